"""The agent under upstream's name: processes get their variables, a failed one starts again."""

import uuid
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

from deepspeed.elasticity import DSElasticAgent


def test_variables_and_restart(tmp_path: Path) -> None:
    # Kills: an agent that drops `env`, or lets it override what it sets itself.
    script = "echo $COLOUR $RANK >> seen; [ -e failed ] || { touch failed; exit 1; }"
    parameters = RendezvousParameters(
        "c10d",
        str(tmp_path / "store"),
        uuid.uuid4().hex,
        1,
        1,
        local_addr="127.0.0.1",
        is_host=True,
        store_type="file",
    )
    spec = WorkerSpec(
        role="default",
        local_world_size=1,
        entrypoint="sh",
        args=("-c", f"cd {tmp_path}; {script}"),
        rdzv_handler=registry.get_rendezvous_handler(parameters),
        max_restarts=1,
    )
    result = DSElasticAgent(
        spec, {"COLOUR": "blue", "RANK": 7}, log_dir=str(tmp_path / "logs")
    ).run()
    assert not result.is_failed()
    assert (tmp_path / "seen").read_text() == "blue 0\nblue 0\n"
