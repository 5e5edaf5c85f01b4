"""The disk of the qemu machine: a bare Debian 12 server with its own kernel, made once per content hash.

It must not have what the appliance brings: no gi, pydbus, venv, iptables or conntrack. An entry of the cache holds
disk.raw, vmlinuz, initrd, key, key.pub and known_hosts (a key made for this entry alone).
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.host.roots import HostError, Recipe, bootstrap, cached, digest

HOST_ALIAS = "appliance-vm"  # under which ssh knows the host keys, whatever the port
ADMIN = "admin"  # may use sudo without a password; root can log in as well, both with the entry's key

_MASKED = (  # slow under software emulation, of no use here; a machine of an hour needs no housekeeping
    "apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer fstrim.timer e2scrub_all.timer e2scrub_reap.service"
    " getty@tty1.service serial-getty@ttyS0.service systemd-networkd-wait-online.service"
)
_INITRD = "virtio_pci\\nvirtio_blk\\next4\\nvirtio_net\\nvirtio_rng\\n"
_NETWORK = "[Match]\\nType=ether\\n[Network]\\nAddress=10.0.2.15/24\\nGateway=10.0.2.2\\nIPv6AcceptRA=no\\n"

SERVER = Recipe(
    name="server",
    packages=(
        "systemd", "systemd-sysv", "dbus", "udev", "kmod", "linux-image-cloud-amd64", "initramfs-tools",
        "openssh-server", "python3", "sudo", "iproute2", "procps", "netbase", "tzdata", "logrotate", "less", "zstd",
        "xz-utils", "ca-certificates",
    ),
    commands=(
        # A small initrd: the kernel has no virtio or ext4 of its own, and needs nothing else to find its disk.
        "printf \"MODULES=list\\nCOMPRESS=zstd\\n\" > /etc/initramfs-tools/conf.d/vm",
        f"printf \"{_INITRD}\" > /etc/initramfs-tools/modules; update-initramfs -u 2>&1",
        f"systemctl enable systemd-networkd ssh; systemctl mask {_MASKED}",
        f"printf \"{_NETWORK}\" > /etc/systemd/network/10-ether.network",
        "echo gpuhost > /etc/hostname; printf \"127.0.0.1 localhost gpuhost\\n::1 localhost gpuhost\\n\" > /etc/hosts",
        "echo \"/dev/vda / ext4 defaults 0 0\" > /etc/fstab; : > /etc/machine-id",
        # One kind of host key: each costs sshd time at every start.
        "rm -f /etc/ssh/ssh_host_rsa_key* /etc/ssh/ssh_host_ecdsa_key*",
        "printf \"UseDNS no\\nPrintMotd no\\n\" > /etc/ssh/sshd_config.d/vm.conf",
        f"useradd --create-home --shell /bin/bash {ADMIN}",
        f"echo \"{ADMIN} ALL=(ALL) NOPASSWD: ALL\" > /etc/sudoers.d/{ADMIN}; chmod 440 /etc/sudoers.d/{ADMIN}",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Image:
    """A machine's disk. `size` is what the guest sees; the file is sparse."""

    recipe: Recipe = field(default=SERVER)
    size: str = "8G"

    @property
    def name(self) -> str:
        return f"vm-{self.recipe.name}"

    def digest(self) -> str:
        return digest([asdict(self), HOST_ALIAS])

    def directory(self) -> Path:
        """Of the entry in the cache, built where it is absent (about a minute)."""
        return cached(self.name, self.digest(), self._build)

    def _build(self, directory: Path) -> None:
        root = directory / "root"
        bootstrap(self.recipe, root)
        for pattern, name in (("vmlinuz-*", "vmlinuz"), ("initrd.img-*", "initrd")):
            (found,) = (root / "boot").glob(pattern)
            shutil.copyfile(found, directory / name)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test machine", "-f", str(directory / "key"))
        for home, owner in ((root / "root", 0), (root / "home" / ADMIN, 1000)):
            _authorize(home, owner, (directory / "key.pub").read_text())
        host_key = (root / "etc/ssh/ssh_host_ed25519_key.pub").read_text().split()
        (directory / "known_hosts").write_text(f"{HOST_ALIAS} {host_key[0]} {host_key[1]}\n")
        disk = directory / "disk.raw"
        _run("truncate", "-s", self.size, str(disk))
        _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1,lazy_journal_init=1", "-d", str(root), str(disk))
        shutil.rmtree(root)


def _authorize(home: Path, owner: int, public_key: str) -> None:
    directory = home / ".ssh"
    directory.mkdir(mode=0o700, exist_ok=True)
    directory.chmod(0o700)
    (directory / "authorized_keys").write_text(public_key)
    for path in (directory, directory / "authorized_keys"):
        shutil.chown(path, owner, owner)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    if done.returncode:
        raise HostError(f"{command[0]} failed: {done.stderr[-2000:]}")
