COVERS = ("ops.adam", "runtime.zero.offload_states")
