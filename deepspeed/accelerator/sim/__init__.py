"""The simulated device: CUDA's streams, events, allocator and autograd order on host tensors.

`queues`: streams, events and in which order deferred work runs. `memory`: the caching allocator.
`peak`: who holds memory at its peak. `dispatch`: how an operator becomes deferred work, whose
results `plans` knows. `host_reads`: what else makes the host look at a tensor. `host_waits`: which
of that would make the host wait, counted. `backward`: on which stream a gradient is made.
`simulator`: all of them together. `deepspeed.accelerator.sim_accelerator` is the device that the
package sees; `issue_log` keeps what a program issues.
"""
