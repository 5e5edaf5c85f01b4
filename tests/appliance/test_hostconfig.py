"""appliance.toml: every error names file and key and says what is allowed; defaults are what `config defaults` prints."""

# ruff: noqa: E501 (messages are compared whole)
from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import tomllib
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.cli import main
from appliance.config_cli import toml_lines, toml_value
from appliance.hostconfig import (
    SECTIONS,
    HostConfig,
    HostConfigError,
    gpu_memory_fraction,
    load_config,
    parse_config,
    parse_cpus,
    parse_size,
)
from engine.spawn import python_env
from tests.certificates import make_certificate

KEYS = [(section, key) for section, table in SECTIONS.items() for key in table.__struct_fields__]


def problem(text: str | bytes) -> HostConfigError:
    with pytest.raises(HostConfigError) as caught:
        parse_config(text.encode() if isinstance(text, str) else text, where="f")
    assert caught.value.exit_code == 4 and caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    "text, message",
    [
        ("[gateway]\nprot = 8000", "f: gateway.prot: unknown key; did you mean port?"),
        ("[gateway]\nxyzzy = 8000", "f: gateway.xyzzy: unknown key"),
        ("[gatway]\nport = 8000", "f: gatway: unknown key; did you mean [gateway]?"),
        ("port = 8000", "f: port: unknown key; did you mean gateway.port?"),
        ("drain_timeout = 5", "f: drain_timeout: unknown key; did you mean engine.drain_timeout or gateway.drain_timeout?"),
        ('[gateway]\nport = "8000"', "f: gateway.port: '8000' is not a whole number from 1 to 65535"),
        ("[gateway]\nport = 0", "f: gateway.port: 0 is not a whole number from 1 to 65535"),
        ("[gateway]\nport = true", "f: gateway.port: True is not a whole number from 1 to 65535"),
        ("[gateway]\ntls = 1", "f: gateway.tls: 1 is not true or false"),
        ("gateway = 3", "f: gateway: 3 is not a table"),
        ("[gateway]\nhost = 'localhost'", "f: gateway.host: 'localhost' is no IP address"),
        ("[gateway]\nport = 8001", "f: gateway.canary_port: gateway.canary_port is 8001, the same as gateway.port; choose another"),
        ("[gateway]\nport = 9601", "f: gateway.admin_port: gateway.admin_port + 1 is 9601, the same as gateway.port; choose another"),
        ("[gateway]\nadmin_port = 65535", "f: gateway.admin_port: 65535 leaves no port after it for the canary's metrics"),
        ("[gateway]\nwait_timeout = inf", "f: gateway.wait_timeout: inf is not a number from 0.05 to 86400"),
        ("[gateway]\nwait_timeout = nan", "f: gateway.wait_timeout: nan is not a number from 0.05 to 86400"),
        ("[gateway]\nmetrics_buckets_seconds = [1, inf]", "f: gateway.metrics_buckets_seconds: [1, inf] is not a list, each a number above 0 to 86400"),
        ("[engine]\nmax_model_len = 1", "f: engine.max_model_len: 1 is not a whole number from 2 to 1000000"),
        ("[engine]\nstart_timeout = 0.05", "f: engine.start_timeout: 0.05 is not a number from 5 to 86400"),
        ("[engine]\nplacement = 'both'", "f: engine.placement: 'both' is not one of \"exclusive\", \"shared\""),
        ("[engine]\nmemory_max = '24'", "f: engine.memory_max: '24' is 24 bytes, which no engine starts in; did you mean \"24G\"?"),
        ("[engine]\nmemory_max = '24GB'", "f: engine.memory_max: '24GB' is neither \"auto\" nor a size like \"24G\""),
        ("[engine]\nallowed_cpus = '²'", "f: engine.allowed_cpus: '²' is neither \"auto\" nor a list like \"0-15,32\""),
        ("[engine]\nallowed_cpus = '3-1'", "f: engine.allowed_cpus: '3-1' is neither \"auto\" nor a list like \"0-15,32\""),
        ("[engine]\ngpu_memory_fraction = 0.6", "f: engine.gpu_memory_fraction: 0.6 does not fit twice; with placement \"shared\" at most 0.475, or placement = \"exclusive\""),
        ("[engine]\narguments = ['--max-model-len=7']", "f: engine.arguments: --max-model-len has a key of its own: engine.max_model_len"),
        ("[engine]\narguments = ['--por', '80']", "f: engine.arguments: --por is set by the launcher"),
        ('[engine]\narguments = ["a\\u0000b"]', "f: engine.arguments: 'a\\x00b' holds a NUL byte"),
        ("[restart]\nfirst_delay = 90", "f: restart.first_delay: 90 is more than max_delay, 60"),
        ("[gpus]\ndevices = []", 'f: gpus.devices: an empty list: no GPU could be used; "all" or at least one UUID'),
        ("[gpus]\ndevices = ['MIG-1f292bf8-f63f-570f-a866-efaab3ceb50a']", "f: gpus.devices: 'MIG-1f292bf8-f63f-570f-a866-efaab3ceb50a' is a MIG instance; MIG is not supported, use whole GPUs"),
        ("[gpus]\ndevices = ['0']", "f: gpus.devices: '0' is no GPU UUID like GPU-5fd4f087-86f3-7a43-b711-4771313afc50"),
        ("schema = 2\nnew = 1", "f: schema: 2 is not 1"),
        ("schema = true", "f: schema: True is not 1"),
        ("[gateway]\nport = 1\nport = 2", "f: not TOML: Cannot overwrite a value at the end of the file"),
    ],
)  # fmt: skip
def test_errors_name_file_key_and_what_is_allowed(text: str, message: str) -> None:
    assert problem(text).message == message


def test_a_wrong_value_is_explained_with_meaning_and_default() -> None:
    assert problem("[gateway]\nport = 0").hint == "port: of the stable endpoint (default 8000)"
    assert "known in [gateway]: host, port, " in str(problem("[gateway]\nprot = 0").hint)


@pytest.mark.parametrize("data", [b"\xff", b"x = " + b"1" * 5000, b"a = " + b"[" * 5000, b"x", b"\x00"])
def test_what_is_not_toml_is_an_error_of_its_own(data: bytes) -> None:
    assert problem(data).message.startswith("f: not TOML: ")


def test_nothing_written_means_all_defaults() -> None:
    assert parse_config(b"", where="f") == HostConfig() == parse_config(b"\xef\xbb\xbf", where="f")  # a BOM is no text


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "big").write_bytes(b"#" * ((1 << 20) + 1))
    for name, words in (("none", "No such file"), ("fifo", "no regular file"), ("big", "larger than")):
        with pytest.raises(HostConfigError, match=words):
            load_config(tmp_path / name)


def test_defaults_printed_are_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "defaults"]) == 0
    text = capsys.readouterr().out
    assert parse_config(text.encode(), where="f") == HostConfig()
    for _, key in KEYS:
        assert f"\n{key} = " in text or f"\n# {key} =" in text
    assert all(
        len(line) > 12 for line in text.splitlines() if line.startswith("# ") and "=" not in line
    )  # all explained


WRONG: list[Any] = [True, 0, -1, 10**30, 0.0, -0.5, 1e9, "", "nonsense", [], ["x"], [[1]], {"a": 1}]


@pytest.mark.parametrize("section, key", KEYS)
def test_every_key_refuses_or_takes_a_value_by_name(section: str, key: str) -> None:
    """Of a dozen odd values for each key: an error that names it, or a value that is there afterwards."""
    refused = 0
    for value in WRONG:
        rendered = f"{{a = {value['a']}}}" if isinstance(value, dict) else toml_value(value)
        try:
            config = parse_config(f"[{section}]\n{key} = {rendered}".encode(), where="f")
        except HostConfigError as error:
            refused += 1
            assert error.message.startswith(f"f: {section}.") and key.split("_")[0] in error.message
        else:
            assert getattr(getattr(config, section), key) == value
    assert refused >= 7


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300) | st.text(max_size=300).map(lambda text: text.encode(errors="surrogatepass")))
def test_any_bytes_are_a_config_or_an_error(data: bytes) -> None:
    try:
        assert isinstance(parse_config(data, where="f"), HostConfig)
    except HostConfigError as error:
        assert error.message.startswith("f: ")


scalars = st.integers() | st.floats() | st.booleans() | st.text(max_size=12) | st.lists(st.text(max_size=5), max_size=2)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), scalars, max_size=3))
def test_any_values_are_a_config_or_an_error(values: dict[tuple[str, str], Any]) -> None:
    text = "".join(
        f"{section}.{key} = {toml_value(value).replace('NaN', 'nan').replace('Infinity', 'inf')}\n"
        for (section, key), value in values.items()
    )
    try:
        config = parse_config(text.encode(), where="f")
    except HostConfigError as error:
        assert error.message.startswith("f: ")
    else:
        again = parse_config("\n".join(toml_lines(config)).encode(), where="f")
        assert again == config  # what `config show` prints is the same configuration


@given(st.text())
def test_strings_are_written_as_toml_reads_them(text: str) -> None:
    assert tomllib.loads(f"x = {toml_value(text)}") == {"x": text}


@pytest.mark.parametrize("text", ["1", "512", "16M", "24G", "2T", "1048576", "999K"])
def test_sizes_are_those_of_coreutils(text: str) -> None:
    done = subprocess.run(["numfmt", "--from=iec", text], capture_output=True, text=True, check=True, timeout=30)
    assert parse_size(text) == int(done.stdout)


@given(st.text(alphabet="0123456789KMGTP-+. ²٣", max_size=8))
def test_a_size_is_digits_and_one_unit(text: str) -> None:
    digits = text.rstrip("KMGT")
    good = digits.isascii() and digits.isdecimal() and len(text) - len(digits) <= 1 and int(digits) > 0
    assert (parse_size(text) is not None) == good


@given(st.lists(st.tuples(st.integers(0, 8191), st.integers(0, 40)), min_size=1, max_size=6))
def test_cpu_lists_are_their_union(ranges: list[tuple[int, int]]) -> None:
    pairs = [(low, min(low + length, 8191)) for low, length in ranges]
    text = ",".join(f"{low}-{high}" if high > low else f"{low}" for low, high in pairs)
    assert parse_cpus(text) == sorted({cpu for low, high in pairs for cpu in range(low, high + 1)})


@given(st.text(alphabet="0123456789-, ²٣x", max_size=12))
def test_any_text_is_a_cpu_list_or_none(text: str) -> None:
    cpus = parse_cpus(text)
    assert cpus is None or (cpus == sorted(set(cpus)) and cpus[0] >= 0 and cpus[-1] <= 8191)


@pytest.mark.timeout(5)
def test_a_long_cpu_list_is_refused_at_once() -> None:
    assert parse_cpus("0-8191," * 100_000 + "0") is None and parse_cpus("8192") is None


def test_memory_fraction_follows_placement() -> None:
    def fraction(text: str) -> float:
        return gpu_memory_fraction(parse_config(text.encode(), where="f").engine)

    assert fraction("") == 0.45
    assert fraction("engine.placement = 'exclusive'") == 0.9
    assert fraction("engine.gpu_memory_fraction = 0.3") == 0.3


# -- appliance config


def test_config_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPLIANCE_ROOT", str(tmp_path))
    file = tmp_path / "etc/appliance/appliance.toml"
    file.parent.mkdir(parents=True)
    file.write_text("[gateway]\nport = 8080\n")
    assert main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: ok (keys and certificate not looked at)\n"
    assert main(["config", "show"]) == 0
    text = capsys.readouterr().out
    assert "\nport = 8080\n" in text and "\ncanary_port = 8001  # default\n" in text
    assert main(["config", "show", "--json"]) == 0
    shown = msgspec.json.decode(capsys.readouterr().out)
    assert shown["config"]["gateway"]["port"] == 8080 and shown["set"] == ["gateway.port"] and shown["schema"] == 1
    (tmp_path / "bad.toml").write_text("[gateway]\nprot = 1")
    assert main(["config", "check", str(tmp_path / "bad.toml")]) == 4
    assert "gateway.prot: unknown key; did you mean port?" in capsys.readouterr().err
    assert main(["config", "check", str(tmp_path / "missing.toml")]) == 4


@pytest.mark.parametrize(
    ("data", "place", "shown"),
    [
        (b"[gateway]\nport 8000\n", "line 2, column 6: Expected '='", "in: port 8000"),
        (b"[gateway]\nhost = 0.0.0.0\n", "line 2, column 11: Expected newline", "in: host = 0.0.0.0"),
        (b"[gateway\nport = 1\n", "line 1, column 9: Expected ']'", "in: [gateway"),
        (b'[gateway]\nhost = "x\ny', "line 2, column 10: Illegal character", "in: host ="),
        (b"\n\n\xff\xfe\x00x", "line 3 holds the byte 0xff, which is not UTF-8", "save it as UTF-8"),
    ],
)
def test_a_file_that_is_not_toml_says_where_and_what_toml_expects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, place: str, shown: str
) -> None:
    file = tmp_path / "appliance.toml"
    file.write_bytes(data)
    assert main(["config", "check", str(file)]) == 4
    err = capsys.readouterr().err
    assert f"{file}: not TOML: {place}" in err and shown in err
    assert "config check" not in err and ("key = value" in err or "UTF-8" in err)


@pytest.mark.parametrize(
    ("schema", "hint"),
    [
        ("0", "this version reads schema 1: write schema = 1, or leave it out"),
        ('"1"', "this version reads schema 1: write schema = 1, or leave it out"),
        ("2", "this version reads schema 1; a newer one wrote the file"),
    ],
)
def test_another_schema_says_which_one_this_version_reads(schema: str, hint: str) -> None:
    with pytest.raises(HostConfigError) as caught:
        parse_config(f"schema = {schema}".encode(), where="f")
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[engine]\narguments = ['--threads', '2', '--kv-tokens=4096']\n[gpus]\nbackend = 'cpu'", None),
        ("[engine]\narguments = ['--no-cuda-graphs']", None),
        ("[engine]\narguments = ['--bogus']", "unrecognized arguments: --bogus"),
        ("[engine]\narguments = ['--kv-tokens', 'many']", "argument --kv-tokens: 'many' is not a number"),
        ("[engine]\narguments = ['--kv-tokens']", "argument --kv-tokens: expected one argument"),
        ("[engine]\narguments = ['stray']", "unrecognized arguments: stray"),
        ("[engine]\narguments = ['--threads', '100000']\n[gpus]\nbackend = 'cpu'", "at most 256 threads"),
        ("[engine]\narguments = ['--kv-tokens', '1000000000000']\n[gpus]\nbackend = 'cpu'", "bytes of memory"),
        ("[engine]\narguments = ['--kv-tokens', '16384']\n[gpus]\nbackend = 'cpu'", None),
        ("[engine]\narguments = ['--help']", "prints a text and ends"),
        ("[engine]\narguments = ['--threads', '2']", "num_threads is an option o"),  # of the other backend
    ],
)
def test_check_asks_the_engine_about_its_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str | None
) -> None:
    file = tmp_path / "appliance.toml"
    file.write_text(text)
    assert main(["config", "check", str(file)]) == (0 if says is None else 4)
    shown = capsys.readouterr()
    if says is not None:
        assert f"{file}: engine.arguments: " in shown.err and says in shown.err and "usage:" not in shown.err


@pytest.mark.parametrize(("backend", "code"), [("cpu", 4), ("cuda", 0)])
def test_check_asks_the_engine_whether_sizes_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str, code: int
) -> None:
    """256 sequences do not fit a step of the CPU backend, which takes 256 tokens, one of them a page of prefill."""
    file = tmp_path / "appliance.toml"
    file.write_text(f"[gpus]\nbackend = '{backend}'\n[engine]\nmax_batch_seqs = 256\n")
    assert main(["config", "check", str(file)]) == code
    assert ("engine.max_batch_seqs: no engine would start" in capsys.readouterr().err) == (code == 4)


KEY_LINE = "# clients\n" + "0" * 64 + "  ops\n"


@pytest.mark.parametrize(
    ("gateway", "files", "says"),
    [
        ("", {}, None),
        ("host = '127.0.0.2'", {}, None),
        ("host = '0.0.0.0'", {}, "refusing to bind 0.0.0.0 without API keys"),
        ("host = '0.0.0.0'", {"api-keys": "\n"}, "refusing to bind 0.0.0.0 without API keys"),
        ("host = '0.0.0.0'", {"api-keys": "no key\n"}, "api-keys"),
        ("host = '0.0.0.0'", {"api-keys": KEY_LINE}, None),
        ("host = '0.0.0.0'\nauth = 'none'", {}, None),
        ("canary_host = '::'", {}, "refusing to bind :: without API keys (gateway.canary_host)"),
        ("canary_host = '::'", {}, 'set gateway.canary_host = "127.0.0.1"'),
        ("host = '0.0.0.0'", {}, 'set gateway.host = "127.0.0.1"'),
        ("admin_host = '0.0.0.0'", {}, 'set gateway.admin_host = "127.0.0.1"'),
        ("admin_host = '0.0.0.0'", {"api-keys": KEY_LINE}, None),
        ("admin_host = '0.0.0.0'\nauth = 'none'", {}, None),
        ("auth = 'keys'", {}, 'gateway.auth is "keys", but there is no API key'),
        ("auth = 'keys'", {}, "credentials/api-keys (printf"),
        ("auth = 'keys'", {"api-keys": "\n"}, "credentials/api-keys (printf"),
        ("auth = 'keys'", {"api-keys": KEY_LINE}, None),
        ("tls = true", {}, "there is no certificate and key"),
        ("tls = true", {"tls-cert": "x", "tls-key": "y"}, "cannot load the TLS certificate"),
    ],
)
def test_what_gateways_would_refuse_is_refused_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gateway: str,
    files: dict[str, str], says: str | None,
) -> None:  # fmt: skip
    """A file that passes must not be one with which the gateways do not start: the playbook restarts them with it."""
    monkeypatch.setenv("APPLIANCE_ROOT", str(tmp_path))
    config, credentials = tmp_path / "etc/appliance/appliance.toml", tmp_path / "etc/appliance/credentials"
    credentials.mkdir(parents=True)
    config.write_text(f"[gateway]\n{gateway}\n")
    for name, text in files.items():
        (credentials / name).write_text(text)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    status = main(["config", "check"])
    assert (status, main(["config", "check", str(config), "--credentials", str(credentials)])) == (
        (0, 0) if says is None else (4, 4)
    )
    assert says is None or says in capsys.readouterr().err
    assert main(["config", "check", str(config)]) == 0
    for wrong in (config, tmp_path / "missing"):  # nothing there to look at is no "ok"
        assert main(["config", "check", str(config), "--credentials", str(wrong)]) == 2


@pytest.mark.parametrize("name", ["api-keys", "tls-cert", "tls-key"])
@pytest.mark.parametrize("kind", ["directory", "fifo", "empty", "garbage", "loop", "dangling", "huge"])
def test_a_credential_that_cannot_be_used_is_refused_whatever_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    certificate, key = make_certificate(tmp_path)
    credentials, config = tmp_path / "credentials", tmp_path / "appliance.toml"
    credentials.mkdir()
    config.write_text("[gateway]\ntls = true\nauth = 'keys'\n")
    for each, content in (("api-keys", KEY_LINE), ("tls-cert", certificate.read_text()), ("tls-key", key.read_text())):
        (credentials / each).write_text(content)
    command = ["config", "check", str(config), "--credentials", str(credentials)]
    assert main(command) == 0
    bad = credentials / name
    bad.unlink()
    if kind == "directory":
        bad.mkdir()
    elif kind == "fifo":
        os.mkfifo(bad)
    elif kind == "loop":
        bad.symlink_to(bad)
    elif kind == "dangling":
        bad.symlink_to(tmp_path / "not-mounted")
    else:
        bad.write_bytes({"empty": b"", "garbage": bytes(range(256)) * 9, "huge": b"#" * (2 << 20)}[kind])
    assert main(command) == 4
    err = capsys.readouterr().err
    assert "error: " in err and "hint: " in err and "Traceback" not in err


@pytest.mark.parametrize("auth", ["auto", "none"])
@pytest.mark.parametrize("kind", ["directory", "dangling", "dangling parent"])
def test_keys_that_are_there_and_cannot_be_loaded_are_not_no_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str, auth: str
) -> None:
    """auth = "auto" on loopback is open without keys: a link whose mount is missing must not open it."""
    monkeypatch.setenv("APPLIANCE_ROOT", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    etc = tmp_path / "etc/appliance"
    etc.mkdir(parents=True)
    (etc / "appliance.toml").write_text(f"[gateway]\nauth = '{auth}'\n")
    if kind == "dangling parent":
        (etc / "credentials").symlink_to(tmp_path / "not-mounted")
    elif kind == "dangling":
        (etc / "credentials").mkdir()
        (etc / "credentials/api-keys").symlink_to(tmp_path / "not-mounted")
    else:
        (etc / "credentials/api-keys").mkdir(parents=True)
    assert main(["config", "check"]) == 4
    err = capsys.readouterr().err
    assert f"{etc}/credentials/api-keys cannot be loaded" in err and "a regular file of root" in err


def test_missing_tls_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "appliance.toml").write_text("[gateway]\ntls = true\n")
    assert main(["config", "check", str(tmp_path / "appliance.toml"), "--credentials", str(tmp_path)]) == 4
    assert "/etc/appliance/credentials/tls-cert" in capsys.readouterr().err


@pytest.mark.parametrize(("bits", "says"), [(1024, "2048 bits or more"), (2048, None)])
def test_a_key_that_openssl_finds_too_small_is_said_to_be_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bits: int, says: str | None
) -> None:
    argv = ["openssl", "req", "-x509", "-nodes", "-newkey", f"rsa:{bits}", "-subj", "/CN=box", "-days", "30"]
    argv += ["-keyout", str(tmp_path / "tls-key"), "-out", str(tmp_path / "tls-cert")]
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
    (tmp_path / "appliance.toml").write_text("[gateway]\ntls = true\n")
    code = main(["config", "check", str(tmp_path / "appliance.toml"), "--credentials", str(tmp_path)])
    err = capsys.readouterr().err
    assert code == (4 if says else 0) and (says or "") in err and "belong together" not in err


@pytest.mark.timeout(30)
def test_an_encrypted_key_is_refused_without_asking_for_its_pass_phrase(tmp_path: Path) -> None:
    """OpenSSL asks /dev/tty, where there is one: the command gets one of its own, on which nobody answers."""
    certificate, key = make_certificate(tmp_path, pass_phrase="a secret phrase")
    (tmp_path / "appliance.toml").write_text("[gateway]\ntls = true\n")
    certificate.rename(tmp_path / "tls-cert")
    key.rename(tmp_path / "tls-key")
    ours, its = pty.openpty()
    try:
        done = subprocess.run(
            ["setsid", "--ctty", "--wait", sys.executable, "-P", "-m", "appliance", "config", "check",
             str(tmp_path / "appliance.toml"), "--credentials", str(tmp_path)],
            stdin=its, capture_output=True, text=True, timeout=20, env=python_env(),
        )  # fmt: skip
        shown = os.read(ours, 4096) if select.select([ours], [], [], 0)[0] else b""
    finally:
        os.close(ours)
        os.close(its)
    assert done.returncode == 4 and "is encrypted" in done.stderr and "openssl pkey -in" in done.stderr
    assert b"phrase" not in shown


@pytest.mark.parametrize(
    ("days", "says"),
    [((-30, -2), "'box' expired on 20"), ((2, 30), "'box' is not valid before 20"), ((-1, 2), None), ((-1, 30000), None)],
)  # fmt: skip
def test_a_certificate_that_clients_refuse_today_is_no_ok(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], days: tuple[int, int], says: str | None
) -> None:
    certificate, key = make_certificate(tmp_path, days=days)
    ends = subprocess.run(
        ["openssl", "x509", "-in", certificate, "-noout", "-enddate"], check=True, capture_output=True, text=True
    ).stdout
    config = tmp_path / "appliance.toml"
    config.write_text("[gateway]\ntls = true\n")
    certificate.rename(tmp_path / "tls-cert")
    key.rename(tmp_path / "tls-key")
    assert main(["config", "check", str(config), "--credentials", str(tmp_path)]) == (0 if says is None else 4)
    err = capsys.readouterr().err
    assert says is None or says in err
    if says and "expired" in says:
        moment = datetime.strptime(ends.strip(), "notAfter=%b %d %H:%M:%S %Y %Z")
        assert f"{moment:%Y-%m-%d %H:%M} UTC" in err


def test_an_expired_authority_in_the_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificate, key = make_certificate(tmp_path)
    old, _ = make_certificate(tmp_path, "old-authority", days=(-90, -5), authority=True)
    config = tmp_path / "appliance.toml"
    config.write_text("[gateway]\ntls = true\n")
    (tmp_path / "tls-cert").write_text(certificate.read_text() + old.read_text())
    key.rename(tmp_path / "tls-key")
    assert main(["config", "check", str(config), "--credentials", str(tmp_path)]) == 4
    assert "'old-authority' expired on 20" in capsys.readouterr().err
