"""Training under fire: kills, full disks and damaged files, and what must be left once the run is resumed.

    python scripts/faults.py [--kills 50] [--disks 10] [--damage 1000] [--seed 0] [--work build/faults]

A run of the embedded task (12 steps, a checkpoint after every second) is made once undisturbed. Then:

- kills: it is killed (SIGKILL) at a random moment and resumed, again and again, also while it resumes; when it reaches
  its end, the next begins in an empty folder;
- disks: it is made on a file system too small for it (a tmpfs; without the right to mount one, a limit on the size of a
  file), which grows by a step and the run is resumed, until it ends;
- damage: each file of an interrupted run's folder, and of a finished one's, is damaged, one at a time, in a fresh copy,
  and the run is resumed: truncated at a random place, one bit flipped, half of it zeros, in the place of the same file
  of the other checkpoint or the other folder, or exchanged with it; last, two checkpoints change places, with which an
  interrupted run must stop. `--damage` stops after so many, in random order.

What must hold at every end: weights bit for bit those of the undisturbed run, each logged row once and the same but for
times, the same scores, and the same files. Folders where it does not hold are kept.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RUN = [
    "--per_device_train_batch_size=8", "--num_generations=4", "--steps_per_generation=2", "--num_iterations=1",
    "--max_steps=12", "--save_steps=2", "--save_total_limit=2", "--logging_steps=1", "--max_completion_length=8",
    "--train_prompts=64", "--eval_prompts=2", "--eval_samples=4", "--eval_every=4",
    "--method=Band(KL(), ClipRateController(0.2, 0.05, gain=0.5))",
]  # fmt: skip
# The fork server has imported everything, so a run takes 3 s instead of 12.
PROCESSES = multiprocessing.get_context("forkserver")


def bandpo_train(folder: Path, log: Path, largest_file: int | None) -> None:
    """`bandpo-lab train --resume`, in this process."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if largest_file is not None:
        sys.dont_write_bytecode = True  # a cut one would outlast the run
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    from bandpo_lab.cli import main

    sys.argv = ["bandpo-lab", "train", *RUN, "--output_dir", str(folder), "--resume"]
    main()


class Faults:
    """The undisturbed run, the runs under fire, and what differed."""

    def __init__(self, work: Path, seed: int):
        self.work, self.random, self.log = work, random.Random(seed), work / "runs.log"
        self.whole = work / "whole"
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def train(self, folder: Path, *, kill_after: float | None = None, largest_file: int | None = None) -> int:
        """Start or resume the run; returns how it ended, −9 if it was killed."""
        process = PROCESSES.Process(target=bandpo_train, args=(folder, self.log, largest_file))
        process.start()
        process.join(kill_after)
        process.kill()
        process.join()
        assert process.exitcode is not None
        return process.exitcode

    def undisturbed(self) -> float:
        """Make it; returns how many seconds it takes."""
        self.train(self.work / "first")  # loads what every later process finds loaded
        start = time.monotonic()
        if self.train(self.whole):
            raise SystemExit(f"the undisturbed run failed: see {self.log}")
        return time.monotonic() - start

    def compare(self, what: str, folder: Path) -> None:
        """Look for what a finished run differs in from the undisturbed one."""
        found = [
            name
            for name in ("model/model.safetensors", "evaluation.json", "config.yaml")
            if contents(folder / name) != contents(self.whole / name)
        ]
        if rows(folder) != rows(self.whole):
            found.append("metrics.jsonl")
        if differing := names(folder) ^ names(self.whole):
            found.append(f"{len(differing)} files, as {min(differing)}")
        self.counts["compared"] += 1
        if found:
            kept = self.work / f"wrong-{len(self.wrong)}"
            shutil.copytree(folder, kept)
            self.wrong.append(f"{what}: {'; '.join(found)} (kept in {kept})")
            print(f"WRONG {self.wrong[-1]}", flush=True)

    def resume(self, what: str, folder: Path) -> None:
        """Let a run go on to its end, and compare."""
        if code := self.train(folder):
            self.wrong.append(f"{what}: resuming failed with {code}, see {self.log}")
            print(f"WRONG {self.wrong[-1]}", flush=True)
        else:
            self.compare(what, folder)

    def refuse(self, what: str, folder: Path) -> None:
        """Resume a run of which no checkpoint is whole: it stops, and nothing in its folder changes."""
        before = names(folder)
        code = self.train(folder)
        if code != 2 or (names(folder) ^ before) - {".lock"}:
            self.wrong.append(f"{what}: ended with {code}, see {self.log}")
            print(f"WRONG {self.wrong[-1]}", flush=True)

    def kills(self, number: int, seconds: float) -> None:
        """Kill at moments spread evenly over a whole run's duration."""
        folder, run = self.work / "killed-0", 0
        while self.counts["kills"] < number:
            if self.train(folder, kill_after=self.random.uniform(0, seconds)) == -9:
                self.counts["kills"] += 1
                self.counts["kills while a checkpoint or the model was written"] += bool(
                    list(folder.glob(".unfinished/*/*"))
                )
                self.counts["kills before the first checkpoint"] += not list(folder.glob("checkpoint-*"))
                self.counts["kills after the last step"] += (folder / "checkpoint-12").exists()
                continue
            self.resume(f"kills, run {run}", folder)
            shutil.rmtree(folder)
            run += 1
            folder = self.work / f"killed-{run}"
        self.resume(f"kills, run {run}", folder)
        shutil.rmtree(folder)

    def disks(self, number: int) -> None:
        """Fill the disk at places spread evenly over what the run writes."""
        largest = max(path.stat().st_size for path in self.whole.rglob("*") if path.is_file())
        # Two checkpoints and the unfinished one or the model.
        most = 3 * sum(path.stat().st_size for path in (self.whole / "checkpoint-12").iterdir())
        with small_disk(self.work / "disk") as resize:
            folder = self.work / "disk" / "run"
            for k in range(1, number + 1):
                if resize:
                    resize(most * k // number)
                code = self.train(folder, largest_file=None if resize else largest * k // number)
                self.counts["full disks"] += code != 0
                if code == 0:
                    break
            if resize:
                resize(2 * most)
            self.resume("disks", folder)

    def damage(self, number: int) -> None:
        """Damage each file of an interrupted and of a finished run, in each way."""
        interrupted = self.work / "interrupted"
        process = PROCESSES.Process(target=bandpo_train, args=(interrupted, self.log, None))
        process.start()
        while not (interrupted / "checkpoint-8").exists():
            time.sleep(0.002)
        process.kill()
        process.join()
        sources = {interrupted: self.whole, self.whole: interrupted}
        cases = [
            (how, source, file.relative_to(source))
            for source in sources
            for file in sorted(path for path in source.rglob("*") if path.is_file() and path.stat().st_size)
            if ".unfinished" not in file.parts
            for how in WAYS
        ]
        self.random.shuffle(cases)
        cases += [("changed places", source, Path()) for source in sources]
        for how, source, name in cases[-number:]:
            folder = Path(shutil.copytree(source, self.work / "damaged"))
            if how == "changed places":
                first, second, *_ = sorted(folder.glob("checkpoint-*"))
                exchange(first, second)
            else:
                other = self.other(source, sources[source], name)
                here = folder / (other.relative_to(source) if other.is_relative_to(source) else "none")
                if how == "exchanged" and not here.exists():
                    how = "replaced"
                before = (folder / name).read_bytes()
                WAYS[how](folder / name, here if here.exists() else other, self.random)
                if (folder / name).read_bytes() == before:
                    shutil.rmtree(folder)
                    continue
            self.counts[how] += 1
            checkpoints = list(source.glob("checkpoint-*"))
            if how == "changed places" and source == interrupted and len(checkpoints) == 2:
                self.refuse(f"{source.name}, {how}", folder)
            else:
                self.resume(f"{source.name}, {name} {how}", folder)
            shutil.rmtree(folder)

    def other(self, source: Path, elsewhere: Path, name: Path) -> Path:
        """The same file of another checkpoint, or of the other run folder, or any other file."""
        if name.parts[0].startswith("checkpoint-"):
            other = next(path for path in source.glob("checkpoint-*") if path.name != name.parts[0])
            return other.joinpath(*name.parts[1:])
        return elsewhere / name if (elsewhere / name).exists() else source / "config.yaml"


def cut(file: Path, other: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(file.stat().st_size))


def flip(file: Path, other: Path, chance: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def zero(file: Path, other: Path, chance: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2].ljust(len(content), b"\0"))


def older(file: Path, other: Path, chance: random.Random) -> None:
    shutil.copyfile(other, file)


def exchange(file: Path, other: Path, chance: random.Random | None = None) -> None:
    aside = file.with_name("aside")
    file.rename(aside)
    other.rename(file)
    aside.rename(other)


WAYS = {
    "cut": cut,
    "one bit flipped": flip,
    "half of it zeros": zero,
    "replaced": older,
    "exchanged": exchange,
}


@contextmanager
def small_disk(place: Path) -> Iterator:
    """A tmpfs at ``place``; yields what sets its size in bytes, or None if it may not be mounted."""
    place.mkdir()

    def mount(*options: str) -> bool:
        command = ["mount", "-t", "tmpfs", *options, "bandpo-faults", str(place)]
        return subprocess.run(command, capture_output=True).returncode == 0

    if not mount("-o", "size=1m"):
        print("no right to mount a tmpfs: the size of each file is limited instead", flush=True)
        yield None
        return
    try:
        yield lambda size: mount("-o", f"remount,size={size}")
    finally:
        subprocess.run(["umount", str(place)], check=True)


def contents(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def rows(folder: Path) -> list[dict] | None:
    """The logged rows without times."""
    text = contents(folder / "metrics.jsonl")
    return text and [{**json.loads(line), "step_time": 0} for line in text.splitlines()]


def names(folder: Path) -> set[str]:
    """The files of a run folder, but for what says that something was wrong."""
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in found if not name.startswith(("damaged/", "error.log"))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--disks", type=int, default=10)
    parser.add_argument("--damage", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("build/faults"))
    options = parser.parse_args()
    if options.work.exists():
        parser.error(f"{options.work} is there already; remove it, or give another --work")
    options.work.mkdir(parents=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    PROCESSES.set_forkserver_preload(["bandpo_lab.cli.app", "bandpo_lab.training.train"])
    start, faults = time.monotonic(), Faults(options.work.resolve(), options.seed)
    seconds = faults.undisturbed()
    print(f"undisturbed: {seconds:.1f} s", flush=True)
    faults.kills(options.kills, seconds)
    faults.disks(options.disks)
    faults.damage(options.damage)
    for what, count in faults.counts.items():
        print(f"{what}: {count}")
    print(f"wrong: {len(faults.wrong)}; {time.monotonic() - start:.0f} s")
    raise SystemExit(1 if faults.wrong else 0)


if __name__ == "__main__":
    main()
