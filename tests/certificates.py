"""Certificates of openssl(1), with any dates: `openssl req` can only end them in the future."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

_CONFIG = """
[ca]
default_ca = own
[own]
database = {directory}/index
serial = {directory}/serial
new_certs_dir = {directory}
default_md = sha256
policy = any
x509_extensions = server
[any]
commonName = supplied
[server]
subjectAltName = IP:127.0.0.1
basicConstraints = CA:{authority}
"""


def make_certificate(
    directory: Path,
    name: str = "box",
    *,
    days: tuple[float, float] = (-1, 30),
    pass_phrase: str | None = None,
    authority: bool = False,
) -> tuple[Path, Path]:
    """(certificate, key), signed by itself, valid from `days[0]` to `days[1]` counted from now."""
    work = directory / f"{name}.work"
    work.mkdir(parents=True)
    certificate, key, request = directory / f"{name}.pem", directory / f"{name}.key", work / "request"
    (work / "index").touch()
    (work / "serial").write_text("01")
    (work / "config").write_text(_CONFIG.format(directory=work, authority=str(authority).upper()))
    secret = ["-passout", f"pass:{pass_phrase}"] if pass_phrase else ["-nodes"]
    _openssl("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *secret,
             "-subj", f"/CN={name}", "-keyout", key, "-out", request)  # fmt: skip
    begin, end = ((datetime.now(UTC) + timedelta(days=number)).strftime("%Y%m%d%H%M%SZ") for number in days)
    unlock = ["-passin", f"pass:{pass_phrase}"] if pass_phrase else []
    _openssl("ca", "-batch", "-selfsign", "-notext", "-config", work / "config", "-keyfile", key, *unlock,
             "-in", request, "-startdate", begin, "-enddate", end, "-out", certificate)  # fmt: skip
    return certificate, key


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60)
