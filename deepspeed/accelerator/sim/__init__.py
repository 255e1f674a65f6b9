"""The simulated device: CUDA's streams, events, allocator and autograd order on host tensors.

`queues`: streams, events and in which order deferred work runs. `memory`: the caching allocator.
`dispatch`: how an operator becomes deferred work. `host_reads`: what else makes the host look at a
tensor. `backward`: on which stream a gradient is made. `simulator`: all of them together.
`deepspeed.accelerator.sim_accelerator` is the device that the package sees.
"""
