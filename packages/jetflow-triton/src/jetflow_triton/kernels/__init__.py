"""Triton kernels and their launchers, a module an op family. Imported when a tensor on a GPU asks for one."""
