"""The installed commands `deepspeed` and `ds`: the runner, behind the one line that comes first."""

from deepspeed.launcher.signals import die_at_once


def main() -> None:
    """Run the `deepspeed` command; a Ctrl-C while it loads kills it."""
    die_at_once()
    # startup: loading this takes most of the time in which that Ctrl-C can come
    from deepspeed.launcher.runner import main as run

    run()
