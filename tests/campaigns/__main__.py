"""`python tests/campaigns` lists the campaigns, `python tests/campaigns NAME` runs one."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

# A folder that is run has itself on the import path, not what is beside it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns import clients, programs, selections, versions
from campaigns.campaign import Campaign

CAMPAIGNS: tuple[Campaign, ...] = (*selections.CAMPAIGNS, *programs.CAMPAIGNS, *clients.CAMPAIGNS)
CAMPAIGNS += (versions.CAMPAIGN,)


def listing() -> str:
    """The names of all campaigns and what they do."""
    width = max(len(campaign.name) for campaign in CAMPAIGNS)
    rows = [f"  {campaign.name:{width}}  {campaign.summary}" for campaign in CAMPAIGNS]
    how = '`make campaign NAME=...` runs one, ARGS="--help" tells its parameters:'
    return "\n".join([f"Campaigns run long. {how}", *rows])


def main(words: Sequence[str]) -> int:
    """Run the campaign that the first word names with the others as its arguments."""
    if not words or words[0] in ("-h", "--help"):
        print(listing())
        return 0
    found = {campaign.name: campaign for campaign in CAMPAIGNS}.get(words[0])
    if found is None:
        print(f"there is no campaign {words[0]!r}\n{listing()}", file=sys.stderr)
        return 2
    told = f"{found.name}: {found.summary}"
    parser = argparse.ArgumentParser(prog=f"campaign {found.name}", description=told)
    found.fill(parser)
    arguments = parser.parse_args(list(words[1:]))
    arguments.output = arguments.output.absolute()
    return found.run(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
