# Written by the build (CMakeLists.txt).

NO_CUDA: str
"""Why there is no CUDA code; "" if there is."""
