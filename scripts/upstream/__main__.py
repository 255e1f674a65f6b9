"""`python scripts/upstream 0.19.6` makes this project's fixes as commits for an upstream release
and proves them; `make upstream-patches UPSTREAM=0.19.6` runs it in an environment with upstream's
requirements.

Its argument is a version, whose source distribution comes from the package index, or the path of an
upstream checkout, of which it takes what is committed. Below ``--folder`` it leaves a git repository
with a branch per fix, and the patches as `git format-patch` writes them. Then every regression test
is run without its fix, with its fix alone, and with all fixes; a small training of every stage
follows, and then the checkout's own unit tests of the files touched, before and after. The result
goes into the table of docs/fixes/README.md. A command that was ended goes on where it was: what a
test file has shown is kept in ``logs``, for as long as the tree and the file stay the same. With
``--branch`` the checkout gets a branch per fix that was proved, and is otherwise left as it is.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import fix
import own_tests
import table
from catalogue import FIXES
from releases import ALL, BASE, Checkout, NoSource, Repository, download, held, orders, version_of
from runs import HERE, ROOT, Counts, Run, run_all

DOCUMENT = ROOT / "docs" / "fixes" / "README.md"


def signer(source: Path) -> tuple[str, str]:
    """Who signs the commits off: the git user of ``source``.

    Raises:
        NoSource: git knows none.
    """
    values = []
    for key in ("user.name", "user.email"):
        done = subprocess.run(["git", "config", key], cwd=source, capture_output=True, text=True)
        if not done.stdout.strip():
            raise NoSource(f"commits are signed off: set git's {key} first")
        values.append(done.stdout.strip())
    return values[0], values[1]


def make(repository: Repository, patches: Path) -> tuple[list[table.Row], list[Path]]:
    """A branch and a patch per fix; returns a row per fix, and the patches."""
    rows, names = [], []
    for one in FIXES:
        outcome = repository.commit(one, BASE)
        print(f"{one.name}: {outcome}", flush=True)
        rows.append(table.Row(one.name, outcome))
        if outcome.what == fix.APPLIED:
            names.append(one.name)
    return rows, repository.patches(names, patches)


def same_in_every_order(repository: Repository, patches: list[Path]) -> int:
    """Apply the patches in several orders; the branch `ALL` has them afterwards. Returns how many
    orders gave the same tree.

    Raises:
        RuntimeError: A patch does not apply, or an order gives another tree.
    """
    tried = orders(patches)
    found = {repository.apply_in_order(ALL, order) for order in tried}
    if len(found) > 1:
        raise RuntimeError(f"{len(tried)} orders of the patches give {len(found)} trees")
    return len(tried)


def prove(
    repository: Repository, rows: list[table.Row], folder: Path, jobs: int, only: Sequence[str]
) -> tuple[list[table.Row], Counts]:
    """Run the regression tests without fixes, with each alone, and with all of them, and train with
    all of them: what has not been run yet. Returns the rows with the counts, and those of the
    training. With ``only`` the fixes of these names are run, without and with each alone.
    """
    chosen = [
        (one, row) for one, row in zip(FIXES, rows, strict=True) if one.name in only or not only
    ]
    runs: list[Run] = []

    def on(branch: str, label: str, fixes: Sequence[fix.Fix], *more: Path) -> Run:
        checkout = folder / "checkouts" / branch
        files = (*(fix.REGRESSIONS / one.test for one in fixes), *more)
        log = folder / "logs" / f"{branch}.log"
        run = Run(checkout, files, log, label, repository.tree(branch))
        if run.missing():
            repository.copy_at(branch, checkout)
        runs.append(run)
        return run

    # Once before the tree is copied: the copies then have what Python compiled.
    repository.git("checkout", "--quiet", BASE)
    run_all([Run(repository.root, (), folder / "logs" / "import.log")], 1)
    applied = [one for one, row in chosen if row.outcome.what == fix.APPLIED]
    smoke = HERE / "smoke.py"
    before = on(BASE, "without", [one for one, _ in chosen])
    alone = {one.name: on(one.name, f"with {one.name}", [one]) for one in applied}
    together = on(ALL, "with all", applied, smoke) if not only else None
    run_all(runs, jobs)
    proved = []
    for one, row in chosen:
        counts = [before.counts()[one.test], None, None]
        if one.name in alone:
            counts[1] = alone[one.name].counts()[one.test]
            counts[2] = together.counts()[one.test] if together is not None else None
        proved.append(table.Row(row.name, row.outcome, *counts))
    trained = together.counts()[smoke.name] if together is not None else Counts()
    return proved, trained


def compared(
    repository: Repository, rows: list[table.Row], folder: Path, minutes: float
) -> own_tests.Compared | None:
    """Run the tree's own tests of the files touched, before and after; None if it has none."""
    outcomes = [(one, row.outcome) for one, row in zip(FIXES, rows, strict=True)]
    repository.git("checkout", "--quiet", BASE)
    files = own_tests.chosen(repository.root, outcomes) if minutes > 0 else ()
    if not files:
        return None
    tree = folder / "checkouts" / "own"
    repository.copy_at(BASE, tree)
    say = functools.partial(print, flush=True)
    suite = own_tests.Suite(tree, folder / "logs", folder / "extensions", say)
    branches = [(branch, repository.tree(branch)) for branch in (BASE, ALL)]
    return own_tests.compare(suite, outcomes, files, branches[0], branches[1], minutes)


def main() -> int:
    """Returns the exit code: 0 if every fix is applied or there, and everything is proved."""
    try:
        return command(arguments())
    except NoSource as error:
        print(error, file=sys.stderr)
        return 2
    except RuntimeError as error:
        # Of git: patches that do not apply beside each other, above all.
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ended; the same command goes on where it was", file=sys.stderr)
        return 130


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="upstream-patches", description=__doc__)
    parser.add_argument("upstream", help="version, or path of an upstream source tree")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "upstream")
    parser.add_argument("--no-tests", action="store_true", help="make the patches only")
    parser.add_argument("--jobs", type=int, default=2, help="test runs at a time")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        choices=[one.name for one in FIXES],
        metavar="FIX",
        help="run the tests of these fixes, without and with each alone; the table stays as it is",
    )
    parser.add_argument(
        "--branch",
        action="store_true",
        help="leave a branch per fix that was proved in the checkout (with --no-tests: that applies)",
    )
    parser.add_argument(
        "--own-minutes",
        type=float,
        default=30.0,
        metavar="MINUTES",
        help="after so long no other of the checkout's own tests begins; those that have ended run "
        "again with all fixes; 0 for none (default: 30)",
    )
    return parser.parse_args()


def command(options: argparse.Namespace) -> int:
    """Make the patches, and prove them. Returns the exit code.

    Raises:
        NoSource: The tree cannot be had, or cannot take the branches.
    """
    source = Path(options.upstream).expanduser()
    checkout = None
    if source.is_dir():
        source = source.resolve()
        checkout = Checkout.at(source)
    elif source.name != options.upstream:
        raise NoSource(f"there is no folder {source}")
    else:
        source = download(options.upstream, options.folder / "sources")
    if options.branch and checkout is None:
        raise NoSource(f"--branch needs a git checkout with a commit, which {source} is not")
    release = version_of(source)
    folder = options.folder.absolute() / (f"{release}-checkout" if checkout else release)
    lock = held(folder)
    repository = Repository(folder / "tree", signer(source if checkout else ROOT))
    repository.begin(checkout or source, f"DeepSpeed {release}")
    if checkout and (left := checkout.uncommitted()):
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        print(f"not committed, and left out: {', '.join(left[:5])}{more}")
    rows, patches = make(repository, folder / "patches")
    tried = same_in_every_order(repository, patches)
    print(f"{len(patches)} patches in {folder / 'patches'}, the same tree in {tried} orders")
    applied = [row.name for row in rows if row.outcome.what == fix.APPLIED]
    if checkout and options.branch:
        # Before the proof, which takes long.
        checkout.lacking(repository, applied)
    if options.no_tests:
        good = not any(row.outcome.what == fix.FAILED for row in rows)
    else:
        proved, smoke = prove(repository, rows, folder, options.jobs, options.only)
        if options.only:
            for row in proved:
                alone = f", with it alone {row.alone}" if row.alone is not None else ""
                print(f"{row.name}: without it {row.before}{alone}")
            good = all(row.shown for row in proved)
        else:
            section = table.Section(
                f"{release}, a git checkout" if checkout else release,
                datetime.date.today().isoformat(),
                f"torch {importlib.metadata.version('torch').split('+')[0]}",
                tuple(proved),
                tried,
                smoke,
                compared(repository, rows, folder, options.own_minutes),
            )
            table.write(DOCUMENT, section)
            print(section.text())
            good = section.good
        shutil.rmtree(folder / "checkouts", ignore_errors=True)
        shown = [row.name for row in proved if (row.shown if options.only else row.good)]
        applied = [name for name in applied if name in shown]
    if checkout and options.branch:
        checkout.leave(repository, checkout.lacking(repository, applied))
        print(f"branches in {checkout.root}: {', '.join(applied) or 'none'}")
    lock.close()
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
