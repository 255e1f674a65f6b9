"""The harness of tests that run on several ranks, with upstream's names; a pytest plugin.

pytest evaluates fixtures and parameters once, in its own process; their values are pickled to the
ranks. How ranks are made, watched and ended is in `rank_server`.
"""

import functools
import gc
import importlib.metadata
import inspect
import os
import pickle
import random
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

# Before torch asks for devices: asking CUDA itself keeps what is forked later from using it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import pytest

from unit import rank_server
from unit.rank_server import FAILED, PASSED, SKIPPED, XFAILED, Job, RankResult, RankServer

TIMEOUT_ENV = "DS_UNITTEST_TIMEOUT"
# Ranks for which there are too few devices share them, over gloo: what one device shows of several.
SHARE_ENV = "DS_UNITTEST_SHARE_DEVICES"
DEFAULT_TIMEOUT_S = 60.0

# Threads of several ranks on the same cores wait for each other in turns; one thread each is
# fastest and reproducible.
RANK_ENV = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

server = RankServer()
_items: dict[str, pytest.Item] = {}
ASKED = ("backend", "init_distributed", "set_dist_env")

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

TORCH = tuple(int(number) for number in importlib.metadata.version("torch").split(".")[:2])
# The operations of `deepspeed.comm` are torch's; what a host backend lacks, they lack.
needs_newer_gloo = pytest.mark.skipif(
    TORCH < (2, 8), reason="gloo of torch < 2.8 has no AVG and no reduce_scatter of a list"
)
# 2.9 lacks it, 2.13 has it; the versions between were not run.
needs_all_to_all = pytest.mark.skipif(
    TORCH < (2, 10), reason="gloo of torch 2.9 has no all_to_all of lists"
)


# -- helpers for tests -----------------------------------------------------------------------------


def get_master_port(base_port: int = 29500, port_range_size: int = 1000) -> str:
    """A free port in ``base_port .. base_port + port_range_size - 1``; an OSError if none is."""
    first = random.SystemRandom().randrange(port_range_size)
    for offset in range(first, first + port_range_size):
        port = base_port + offset % port_range_size
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return str(port)
    raise OSError(f"no free port in {base_port}..{base_port + port_range_size - 1}")


def python_path(*folders: object) -> str:
    """PYTHONPATH of a process of a test: these folders, and what all have (`pytest_configure`)."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def accelerator_name() -> str:
    """The name of the accelerator tests run on, e.g. ``cpu``."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()._name


def get_xdist_worker_id() -> int | None:
    """The number of this worker of pytest-xdist; None if there are none."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    return None if worker is None else int(worker.removeprefix("gw"))


def preferred_dtype() -> Any:
    """The shortest dtype that the accelerator computes in: bf16, else fp16, else fp32."""
    import torch

    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.is_bf16_supported():
        return torch.bfloat16
    return torch.float16 if accelerator.is_fp16_supported() else torch.float32


def reduce_boolean_flags(flag: bool, op: Callable[[list[bool]], bool] = all) -> bool:
    """`op` (all, any) of the flags of all ranks, on every rank."""
    import torch

    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator().current_device_name()
    mine = torch.tensor(int(flag), device=device)
    flags = [torch.zeros_like(mine) for _ in range(comm.get_world_size())]
    comm.all_gather(flags, mine)
    return bool(op([bool(one) for one in flags]))


def allclose_on_all_ranks(
    actual: Any, expected: Any, assert_message: str | None = None, **kwargs: Any
) -> None:
    """Fail on every rank if two tensors are not close (`torch.allclose(..., **kwargs)`) on one."""
    import torch

    is_close = bool(torch.allclose(actual, expected, **kwargs))
    assert reduce_boolean_flags(is_close), (
        assert_message or f"this rank: {is_close}\n{actual=}\n{expected=}"
    )


@contextmanager
def standing_in(accelerator: T) -> Iterator[T]:
    """An accelerator in the place of the one that is there."""
    from deepspeed.accelerator import get_accelerator, set_accelerator

    before = get_accelerator()
    set_accelerator(accelerator)  # type: ignore[arg-type]  # a stand-in may have less
    try:
        yield accelerator
    finally:
        set_accelerator(before)


def skip_on_accelerator(*names: str, reason: str = "") -> pytest.MarkDecorator:
    """A mark that skips a test on these accelerators."""
    current = accelerator_name()
    return pytest.mark.skipif(current in names, reason=reason or f"does not run on {current}")


def requires_accelerator(*names: str, reason: str = "") -> pytest.MarkDecorator:
    """A mark that skips a test on all accelerators but these."""
    current = accelerator_name()
    return pytest.mark.skipif(
        current not in names, reason=reason or f"needs {' or '.join(names)}, this is {current}"
    )


def set_seed(seed: int) -> None:
    """Seed Python, numpy, torch and the accelerator."""
    import numpy
    import torch

    from deepspeed.accelerator import get_accelerator

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    get_accelerator().manual_seed_all(seed)


def enable_determinism(seed: int) -> Callable[[F], F]:
    """Decorate a test: the same random numbers everywhere, and deterministic kernels only."""

    def decorate(func: F) -> F:
        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            import torch

            before = torch.are_deterministic_algorithms_enabled()
            # cuBLAS refuses to be deterministic without a fixed workspace.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            set_seed(seed)
            torch.use_deterministic_algorithms(True)
            try:
                return func(*args, **kwargs)
            finally:
                torch.use_deterministic_algorithms(before)

        return wrapper  # type: ignore[return-value]  # functools.wraps keeps the signature, which mypy cannot see

    return decorate


# -- what runs on ranks ----------------------------------------------------------------------------


class DistributedExec:
    """Attributes shared by tests and fixtures on ranks.

    Attributes:
        world_size: the number of ranks; a list runs everything once per size.
        backend: torch's backend; None means the accelerator's.
        init_distributed: make the process group before the test.
        set_dist_env: set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_SIZE, MASTER_ADDR and MASTER_PORT.
        requires_cuda_env: skip when there is no device but the host.
        reuse_dist_env, non_daemonic_procs: upstream's; processes are always fresh and may start
            others, which are killed at the end.
        exec_timeout: seconds after which ranks are given up; None: DS_UNITTEST_TIMEOUT, or 60.
        imports: modules that take long to import, which the ranks of a worker then share.
    """

    world_size: int | list[int] = 2
    backend: str | None = None
    init_distributed: bool = True
    set_dist_env: bool = True
    requires_cuda_env: bool = False
    reuse_dist_env: bool = False
    non_daemonic_procs: bool = False
    exec_timeout: float | None = None
    imports: tuple[str, ...] = ()


class DistributedTest(DistributedExec):
    """Test methods of subclasses run on every rank.

    ``@pytest.mark.world_size(n)`` on a method overrides the class's ``world_size``. `class_tmpdir`
    is one directory for all tests of a class and the fixtures they use.
    """

    is_dist_test = True

    @pytest.fixture(autouse=True, scope="class")
    def class_tmpdir(self, tmp_path_factory: pytest.TempPathFactory) -> str:
        """One directory for all tests of a class."""
        return str(tmp_path_factory.mktemp("class"))


class DistributedFixture(DistributedExec):
    """A fixture, named like the class, whose ``run`` executes on its own ``world_size`` ranks.

    A module that imports the class must import ``fixture_of(the class)`` by assignment too.
    """

    is_dist_fixture = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "run"):
            # pytest finds fixtures among a module's objects; the class itself is not one.
            setattr(sys.modules[cls.__module__], f"_fixture_{cls.__name__}", fixture_of(cls))


def fixture_of(fixture_class: type[DistributedFixture]) -> Any:
    """The pytest fixture that executes ``fixture_class``; assign it to any module-level name."""
    signature = inspect.signature(fixture_class.run)  # type: ignore[attr-defined]  # subclasses define it
    parameters = list(signature.parameters.values())[1:]

    def fixture(**kwargs: Any) -> None:
        request = kwargs["request"]
        values = {parameter.name: kwargs[parameter.name] for parameter in parameters}
        launch(fixture_class, "run", values, fixture_class.world_size, request.node.nodeid)

    asked = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [parameter for parameter in parameters if parameter.name != "request"]
    fixture.__signature__ = inspect.Signature([asked, *known])  # type: ignore[attr-defined]  # read by inspect
    return pytest.fixture(name=fixture_class.__name__)(fixture)


# -- on a rank -------------------------------------------------------------------------------------


def run_on_rank(rank: int, call: dict[str, Any]) -> Callable[[], None] | None:
    """Execute one method on this rank; returns what is to be done when the result is known."""
    import torch

    torch.set_num_threads(1)
    if not call["init_distributed"]:
        rank_server.forget_accelerator()  # the test may ask for another one
    owner: Any = sys.modules[call["module"]]
    for name in call["owner"].split("."):
        owner = getattr(owner, name)
    num_ranks = call["num_ranks"]
    if call["set_dist_env"]:
        os.environ.update(
            {name: str(rank) for name in ("RANK", "LOCAL_RANK")}, CROSS_RANK="0", CROSS_SIZE="1"
        )
        os.environ.update({name: str(num_ranks) for name in ("WORLD_SIZE", "LOCAL_SIZE")})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=call["port"])
    if call["init_distributed"]:
        _join(rank, call)
    kwargs = _values_on_rank(call)
    patch = kwargs["monkeypatch"] = pytest.MonkeyPatch() if "monkeypatch" in call["names"] else None
    if patch is None:
        del kwargs["monkeypatch"]
    try:
        with _shared_device() if os.environ.get(SHARE_ENV) else nullcontext():
            getattr(owner(), call["method"])(**kwargs)
    finally:
        if patch is not None:
            patch.undo()
    return _leave if call["init_distributed"] else None


def _shared_device() -> AbstractContextManager[None]:
    import torch

    from deepspeed.accelerator import get_accelerator
    from unit.on_device import on_device

    name = get_accelerator().current_device_name()
    return nullcontext() if name == "cpu" else on_device(torch.device(name))


def _join(rank: int, call: dict[str, Any]) -> None:
    # The host name may lead to an address that cannot be reached from here; the ranks are all on
    # this machine.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    from deepspeed import comm

    place = {"init_method": f"file://{call['store']}", "world_size": call["num_ranks"]}
    backend = call["backend"]
    if os.environ.get(SHARE_ENV) and call["num_ranks"] > 1:  # NCCL wants a device for each
        backend = "gloo"
    comm.init_distributed(dist_backend=backend, rank=rank, verbose=False, **place)
    rank_server.let_gloo_wait()


def _leave() -> None:
    import torch.distributed

    if torch.distributed.is_initialized():
        # A rank that goes first closes connections on which others may still be working.
        torch.distributed.barrier()
        if torch.distributed.get_backend() != "gloo":  # the end of the process closes sockets
            torch.distributed.destroy_process_group()


def _values_on_rank(call: dict[str, Any]) -> dict[str, Any]:
    values = {name: pickle.loads(data) for name, data in call["pickled"].items()}
    # Parameters that do not pickle (lambdas, local classes) exist here too: the template has
    # collected the same tests.
    for name in call["from_item"]:
        values[name] = _items[call["nodeid"]].callspec.params[name]  # type: ignore[attr-defined]  # a Function
    return values


# -- in pytest -------------------------------------------------------------------------------------


def _timeout_of(exec_class: type[DistributedExec]) -> float:
    if exec_class.exec_timeout is not None:
        return float(exec_class.exec_timeout)
    return float(os.environ.get(TIMEOUT_ENV) or DEFAULT_TIMEOUT_S)


def _skip_without_device(exec_class: type[DistributedExec], num_ranks: int) -> None:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    on_host = accelerator._name == "cpu"
    if exec_class.requires_cuda_env and on_host:
        pytest.skip("needs an accelerator device, and there is only the host")
    if exec_class.backend == "nccl" and accelerator.communication_backend_name() != "nccl":
        pytest.skip(f"needs the nccl backend, and the accelerator is {accelerator._name}")
    backends = (None, accelerator.communication_backend_name())
    uses_devices = not on_host and exec_class.backend in backends
    if uses_devices and accelerator.device_count() < num_ranks and not os.environ.get(SHARE_ENV):
        pytest.skip(f"needs {num_ranks} devices, and there are {accelerator.device_count()}")


def _pack_values(values: dict[str, Any], nodeid: str) -> tuple[dict[str, bytes], list[str]]:
    """Values as pickles, and names of parameters that only the template knows."""
    item = _items.get(nodeid)
    params = item.callspec.params if item is not None and hasattr(item, "callspec") else {}
    pickled: dict[str, bytes] = {}
    from_item: list[str] = []
    for name, value in values.items():
        if name == "monkeypatch":
            continue  # patches must be made, and undone, in the rank: it gets its own
        try:
            pickled[name] = pickle.dumps(value)
        except Exception as error:  # pickle raises whatever the object's own methods raise
            if not (name in params and params[name] is value):
                what = f"the value of {name!r}, {type(value).__name__}, cannot be sent to the ranks"
                pytest.fail(f"{what} ({error}); make it inside of the test", pytrace=False)
            from_item.append(name)
    return pickled, from_item


def launch(
    exec_class: type[DistributedExec],
    method: str,
    values: dict[str, Any],
    world_size: int | list[int],
    nodeid: str,
) -> None:
    """Execute ``exec_class().method(**values)`` on ranks; raises pytest's exceptions of theirs."""
    for num_ranks in [world_size] if isinstance(world_size, int) else world_size:
        _skip_without_device(exec_class, num_ranks)
        pickled, from_item = _pack_values(values, nodeid)
        descriptor, store = tempfile.mkstemp(prefix="store-")
        os.close(descriptor)
        os.unlink(store)  # torch wants a name of which no file exists
        call = {
            "module": exec_class.__module__,
            "owner": exec_class.__qualname__,
            "method": method,
            "names": list(values),
            "pickled": pickled,
            "from_item": from_item,
            "nodeid": nodeid,
            "num_ranks": num_ranks,
            **{name: getattr(exec_class, name) for name in ASKED},
            "port": get_master_port(),
            "store": store,
        }
        timeout_s = _timeout_of(exec_class)
        try:
            body, keys = ("unit.common", "run_on_rank"), {"imports": exec_class.imports}
            results = server.run(Job(body, call, num_ranks, timeout_s, env=RANK_ENV, **keys))
        finally:
            if os.path.exists(store):
                os.unlink(store)
        report(results, timeout_s)


def report(results: list[RankResult], timeout_s: float) -> None:
    """Print what ranks wrote, and raise how they ended: a failure before a skip before a pass."""
    for result in results:
        if result.output:
            head = f"---- output of rank {result.rank} of {len(results)} ----"
            sys.stdout.write(f"{head}\n{result.output.rstrip()}\n")
    # The first to leave decides: what happens to the others afterwards is its consequence.
    ended = sorted((r for r in results if r.outcome != PASSED), key=lambda r: r.ended_at)
    for outcome, leave in ((SKIPPED, pytest.skip), (XFAILED, pytest.xfail)):
        if ended and ended[0].outcome == outcome:
            leave(ended[0].text)
    failed = [r for r in ended if r.outcome == FAILED]
    stuck = [r for r in results if r.outcome != FAILED and r.stacks]
    if failed or stuck:
        pytest.fail(
            "\n".join(_failure_lines(failed, stuck, len(results), timeout_s)), pytrace=False
        )


def _failure_lines(
    failed: list[RankResult], stuck: list[RankResult], num_ranks: int, timeout_s: float
) -> Iterator[str]:
    if not any(result.ended_at != float("inf") for result in failed):
        ranks = sorted(r.rank for r in failed + stuck)
        yield f"ranks {ranks} of {num_ranks} did not end within {timeout_s:g} s"
    for result in failed:
        yield f"==== rank {result.rank} of {num_ranks} failed ===="
        yield result.text.rstrip()
        if result.stacks:
            yield f"---- stacks of rank {result.rank} ----\n{result.stacks.rstrip()}"
    for result in stuck:
        yield f"==== rank {result.rank} of {num_ranks} finished the test but did not end ===="
        yield result.stacks.rstrip()


# -- pytest's hooks --------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark, and let processes that tests start have `processes.sitecustomize`."""
    if not config.getoption("numprocesses", None):  # xdist's workers are no test's processes
        os.environ["PYTHONPATH"] = python_path(Path(__file__).with_name("processes"))
    config.addinivalue_line(
        "markers", "world_size(n): the number of ranks of a DistributedTest method"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect without the garbage collector, which takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the template while everything is imported and nothing has run."""
    # From here on the collector leaves alone what is there: it need not walk through it in any test
    # or rank, and so does not copy pages that ranks share.
    gc.freeze()
    _items.update({item.nodeid: item for item in session.items})
    if "torch" in sys.modules:
        rank_server.seed_the_host_alone()
        rank_server.look_for_fake_tensors_where_some_may_be()
    if any(_is_dist_test(item) for item in session.items) and not session.config.option.collectonly:
        server.start()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the template."""
    server.stop()


def _is_dist_test(item: pytest.Item) -> bool:
    return bool(getattr(getattr(item, "cls", None), "is_dist_test", False))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run methods of `DistributedTest` classes on ranks instead of here."""
    if not _is_dist_test(pyfuncitem):
        return None
    exec_class = pyfuncitem.cls
    names = pyfuncitem._fixtureinfo.argnames
    values = {name: pyfuncitem.funcargs[name] for name in names}
    mark = pyfuncitem.get_closest_marker("world_size")
    world_size = exec_class.world_size if mark is None else mark.args[0]
    launch(exec_class, pyfuncitem.originalname, values, world_size, pyfuncitem.nodeid)
    return True
