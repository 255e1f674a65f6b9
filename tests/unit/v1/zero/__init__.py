COVERS = ("runtime.engine_parts", "runtime.step_observers", "runtime.zero")
