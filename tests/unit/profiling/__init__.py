COVERS = ("profiling.flops_profiler",)
