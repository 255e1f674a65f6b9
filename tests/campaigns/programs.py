"""Campaigns that are programs of their own: random trials, which the suite plays a few of."""

import argparse
import os
import shutil
import sys

from campaigns.campaign import RESULTS, ROOT, Campaign, run_and_keep

ONE = "only trials of this one"


def trials(
    name: str, summary: str, module: str, rounds: int, scratch: bool = False, **options: str
) -> Campaign:
    """A campaign whose program ``module`` takes ``--rounds``, ``--seed`` and ``options``, and an
    empty ``--folder`` if it wants `scratch`.
    """

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        many = "how many trials (default: %(default)s)"
        parser.add_argument("--rounds", type=int, default=rounds, help=many)
        drawn = "draws the trials (default: another each time)"
        parser.add_argument("--seed", type=int, help=drawn)
        for option, words in options.items():
            parser.add_argument(f"--{option}", help=words)

    def run(arguments: argparse.Namespace) -> int:
        command = [sys.executable, "-m", module, "--rounds", str(arguments.rounds)]
        for option in ("seed", *options):
            value = getattr(arguments, option)
            if value is not None:
                command += [f"--{option}", str(value)]
        if scratch:
            folder = RESULTS / f"{name}.files"
            shutil.rmtree(folder, ignore_errors=True)
            command += ["--folder", str(folder)]
        variables = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
        return run_and_keep(command, arguments.output, variables)

    return Campaign(name, summary, add_arguments, run)


CAMPAIGNS = (
    trials(
        "kill-checkpoints",
        "runs killed while they save or swap, and whether the next lost more than a step (minutes)",
        "unit.v1.checkpoint.kills",
        rounds=200,
        case=ONE,
    ),
    trials(
        "families",
        "ds_verify on families of transformers at stages 2 and 3, with several seeds (hours)",
        "unit.verify.families",
        rounds=5,
        family=ONE,
        kind=ONE,
    ),
    trials(
        "architectures",
        "architectures of transformers at stage 3 against plain torch (minutes)",
        "unit.clients.zero3_architectures",
        rounds=2,
        architecture=ONE,
    ),
    trials(
        "bits",
        "equal bits on any number of ranks: configurations, and 500 steps of the demo (a day)",
        "unit.v1.reproducibility.product",
        rounds=1000,
        part="wide: a share of all configurations (default); pipe: of pipelines; long: 120 runs of "
        "the demo's GPT",
        kind='such as "fp16" or "fp16 adam" (default: all)',
        steps="optimizer steps of each run (default: 10, 4 of pipelines, 500 of the long part)",
        rows="file of finished runs, which are not run again; new ones are added",
        minutes="launch nothing later than this",
    ),
    trials(
        "zombies",
        "random failing or interrupted launches, and how many left no process",
        "unit.launcher.zombies",
        rounds=50,
        scratch=True,
    ),
    trials(
        "blame",
        "one of two ranks ends at a random moment, and whether the launcher names it (minutes)",
        "unit.launcher.blame",
        rounds=200,
        end=ONE,
    ),
    trials(
        "starts",
        "two ranks start, train a step and end, and whether one stands or aborts (hours)",
        "unit.comm.starts",
        rounds=2000,
        how="only starts of this kind, forked or spawned",
        load="busy processes beside the ranks (default: as many as cores)",
    ),
)
