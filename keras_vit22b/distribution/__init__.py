"""Models on meshes of devices (JAX)."""
