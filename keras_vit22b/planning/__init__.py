"""Before there is a machine: plan a mesh, and compile a step for it."""
