"""`python scripts/upstream 0.19.6` makes this project's fixes as commits for an upstream release
and proves them; `make upstream-patches UPSTREAM=0.19.6` runs it in an environment with upstream's
requirements.

Its argument is a version, whose source distribution comes from the package index, or the path of an
upstream checkout. Below ``--folder`` it leaves a git repository with a branch per fix, and the
patches as `git format-patch` writes them. Then every regression test is run without its fix, with
its fix alone, and with all fixes; a small training of every stage follows. The result goes into the
table of docs/fixes/README.md. A command that was ended goes on where it was: what a test file has
shown is kept in ``logs``, for as long as the tree and the file stay the same.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import fix
import table
from catalogue import FIXES
from releases import ALL, BASE, NoSource, Repository, download, orders
from runs import HERE, ROOT, Counts, Run, run_all

DOCUMENT = ROOT / "docs" / "fixes" / "README.md"


def signer() -> tuple[str, str]:
    """Who signs the commits off: the git user.

    Raises:
        SystemExit: git knows none.
    """
    values = []
    for key in ("user.name", "user.email"):
        done = subprocess.run(["git", "config", key], cwd=ROOT, capture_output=True, text=True)
        if not done.stdout.strip():
            raise SystemExit(f"commits are signed off: set git's {key} first")
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

    def on(branch: str, fixes: Sequence[fix.Fix], *more: Path) -> Run:
        checkout = folder / "checkouts" / branch
        files = (*(checkout / one.test_path for one in fixes), *more)
        for one in fixes:
            fix.put_test(one, checkout)
        run = Run(checkout, files, folder / "logs" / f"{branch}.log", repository.tree(branch))
        if run.missing():
            repository.copy_at(branch, checkout)
            for one in fixes:
                fix.put_test(one, checkout)
        runs.append(run)
        return run

    # Once before the tree is copied: the copies then have what Python compiled.
    repository.git("checkout", "--quiet", BASE)
    run_all([Run(repository.root, (), folder / "logs" / "import.log")], 1)
    applied = [one for one, row in chosen if row.outcome.what == fix.APPLIED]
    smoke = HERE / "smoke.py"
    before = on(BASE, [one for one, _ in chosen])
    alone = {one.name: on(one.name, [one]) for one in applied}
    together = on(ALL, applied, smoke) if not only else None
    run_all(runs, jobs)
    proved = []
    for one, row in chosen:
        counts = [before.counts()[one.test], None, None]
        if one.name in alone:
            counts[1] = alone[one.name].counts()[one.test]
            counts[2] = together.counts()[one.test] if together is not None else None
        proved.append(table.Row(row.name, row.outcome, *counts))
    trained = together.counts()[smoke.name] if together is not None else Counts()
    shutil.rmtree(folder / "checkouts")
    return proved, trained


def main() -> int:
    """Returns the exit code: 0 if every fix is applied or there, and everything is proved."""
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
    arguments = parser.parse_args()
    source = Path(arguments.upstream)
    release = arguments.upstream
    try:
        if source.is_dir():
            release = (source / "version.txt").read_text(encoding="ascii").strip()
        else:
            source = download(release, arguments.folder / "sources")
    except NoSource as error:
        print(error, file=sys.stderr)
        return 2
    folder = arguments.folder.absolute() / release
    repository = Repository(folder / "tree", signer())
    repository.begin(source, f"DeepSpeed {release}")
    rows, patches = make(repository, folder / "patches")
    tried = same_in_every_order(repository, patches)
    print(f"{len(patches)} patches in {folder / 'patches'}, the same tree in {tried} orders")
    if arguments.no_tests:
        return int(any(row.outcome.what == fix.FAILED for row in rows))
    proved, smoke = prove(repository, rows, folder, arguments.jobs, arguments.only)
    if arguments.only:
        for row in proved:
            alone = f", with it alone {row.alone}" if row.alone is not None else ""
            print(f"{row.name}: without it {row.before}{alone}")
        return int(not all(row.shown for row in proved))
    section = table.Section(
        release,
        datetime.date.today().isoformat(),
        f"torch {importlib.metadata.version('torch').split('+')[0]}",
        tuple(proved),
        tried,
        smoke,
    )
    table.write(DOCUMENT, section)
    print(section.text())
    return int(not section.good)


if __name__ == "__main__":
    sys.exit(main())
