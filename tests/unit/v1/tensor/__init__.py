COVERS = ("module_inject", "runtime.tensor_parallel")
