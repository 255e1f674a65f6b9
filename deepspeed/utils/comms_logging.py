"""Upstream's path of the statistics of collectives."""

from deepspeed._lazy import lazy_attributes

_STATISTICS = ("CommsLogger", "calc_bw_log", "convert_size", "print_rank_0")
__getattr__ = lazy_attributes(
    __name__,
    dict.fromkeys(_STATISTICS, "deepspeed.comm.watch.operation_log")
    | {"get_caller_func": "deepspeed.comm.utils"},
)
