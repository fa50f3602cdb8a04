"""A virtual machine of x86-64 that computes everything in software: no KVM is needed. It has no network, and tells by a
virtio port what its checks have found."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.vm import image

PORT = "checks"  # /dev/virtio-ports/checks in the machine
MEMORY_MIB = 2048
# Without AVX, which is emulated slowly. numpy wants SSE4.2.
PROCESSOR = "Nehalem"
# -icount shift=0: to the machine an instruction takes 1 ns, however long the emulator had to wait for its turn. So no limit of time
# in the machine is passed only because the host is busy; while the machine idles, its clock goes as fast as the host's.


def command(folder: Path, console: Path, words: Sequence[str]) -> list[str]:
    """What starts it. words: further ones on the kernel's command line."""
    kernel = ["-kernel", str(folder / "vmlinuz"), "-initrd", str(folder / "initrd.img")]
    append = ["console=ttyS0", "root=/dev/vda", "rw", "panic=-1", "systemd.show_status=0", "mitigations=off", *words]
    return [
        *(image.QEMU, "-accel", "tcg", "-icount", "shift=0", "-cpu", PROCESSOR, "-smp", "1"),
        *("-m", str(MEMORY_MIB), "-nodefaults", "-no-user-config", "-display", "none"),
        *("-no-reboot", "-nic", "none"),
        *("-serial", f"file:{console}", *kernel, "-append", " ".join(append)),
        *("-drive", f"file={folder / 'disk.img'},format=raw,if=virtio,cache=unsafe"),
        *(
            "-object",
            "rng-random,id=r,filename=/dev/urandom",
            "-device",
            "virtio-rng-pci,rng=r",
            "-device",
            "virtio-serial",
            "-chardev",
            "stdio,id=c,signal=off",
        ),
        *("-device", f"virtserialport,chardev=c,name={PORT}"),
    ]


@contextmanager
def booted(folder: Path, console: Path, words: Sequence[str], limit_s: float) -> Iterator[Iterator[str]]:
    """The lines that the machine tells until it is off. It is turned off at the end, and after limit_s."""
    # the port counts as unplugged, and the machine's writing to it blocks, once stdin is at its end
    process = subprocess.Popen(
        command(folder, console, words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, errors="replace"
    )
    timer = threading.Timer(limit_s, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        yield iter(process.stdout)
    finally:
        timer.cancel()
        process.kill()
        process.wait()
