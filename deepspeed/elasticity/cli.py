"""The `ds_elastic` command: shows what a configuration's `elasticity` block comes to.

Owns: the command line and its output, in upstream's form. Does not own: the arithmetic
(`elasticity`).
"""

import argparse
import json
import sys

from deepspeed.elasticity.config import ElasticityError
from deepspeed.elasticity.constants import ELASTICITY
from deepspeed.elasticity.elasticity import compute_elastic_config
from deepspeed.git_version_info import version

RULE = "-" * 42


def main(args: list[str] | None = None) -> int:
    """Run the command; return 2, with one line on stderr, if there is no answer."""
    description = "Show the batch and world sizes of elastic training."
    parser = argparse.ArgumentParser(prog="ds_elastic", description=description)
    parser.add_argument("-c", "--config", required=True, help="DeepSpeed config json")
    text = "Intended/current world size"
    parser.add_argument("-w", "--world-size", type=int, default=0, help=text)
    parsed = parser.parse_args(args)
    try:
        with open(parsed.config, encoding="utf-8") as stream:
            config = json.load(stream)
        result = compute_elastic_config(config, version, world_size=parsed.world_size)
    except (ElasticityError, OSError, ValueError, NotImplementedError) as error:
        sys.stderr.write(f"ds_elastic: error: {error}\n")
        return 2
    shown = json.dumps(config[ELASTICITY], sort_keys=True, indent=4)
    names = ("final_batch_size ....", "valid_gpus ..........", "micro_batch_size ....")
    values = [f"{name} {value}" for name, value in zip(names, result, strict=False)]
    where = f" for world size {parsed.world_size}" if parsed.world_size else ""
    heads = [RULE, "Elasticity config:", RULE, shown, RULE, f"Calculated results{where}:", RULE]
    sys.stdout.write("\n".join([*heads, *values]) + "\n")
    return 0
