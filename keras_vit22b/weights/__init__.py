"""Tensor names, safetensors files and preset folders."""
