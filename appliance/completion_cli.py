"""`appliance completion bash|zsh`: completion scripts made from the parser, written to files when the bundle is made.

The scripts are static: a TAB never starts Python; GPU slots, releases and models are globs of their directories.
"""

from __future__ import annotations

import argparse
import shlex

from appliance.arguments import set_epilog
from appliance.log import ExitCode
from appliance.parser_tree import PROGRAMS, Argument, Node, tree

EPILOG = """\
examples:
  appliance completion bash > /usr/share/bash-completion/completions/appliance
  appliance completion zsh > /usr/share/zsh/vendor-completions/_appliance
  appliance completion bash --program canary > /usr/share/bash-completion/completions/canary
"""
_GLOBS = {
    "GPU": "/run/appliance/gpu[0-9]*",
    "RELEASE": "/var/lib/appliance/releases/[a-z0-9]*",
    "RUN": "/var/lib/appliance/canary-runs/[0-9]*",
    "MODEL": "/srv/appliance/models/[A-Za-z0-9]*",
}
_BY_COMMAND = {"model": "MODEL", "release": "RELEASE"}  # what NAME is in `appliance COMMAND VERB NAME`


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    set_epilog(parser, EPILOG)
    parser.add_argument("shell", choices=["bash", "zsh"])
    parser.add_argument("--program", choices=PROGRAMS, default="appliance", help="of which command")


def run(args: argparse.Namespace) -> int:
    print(script(tree(args.program), args.shell), end="")
    return ExitCode.DONE


def script(root: Node, shell: str) -> str:
    """The completion script."""
    nodes = list(root.walk())
    tables = _TABLES.format(
        words="\n".join(_case(node, _words(node)) for node in nodes),
        values="\n".join(_value_cases(nodes)),
        positionals="\n".join(filter(None, (_positional(node) for node in nodes))),
        descend="|".join(f'"{" ".join(node.path)}"' for node in nodes if len(node.path) > 1),
        valued="\n".join(filter(None, (_valued(node) for node in nodes))),
    )
    text = (_BASH if shell == "bash" else _ZSH).replace("@TABLES@", tables)
    return text.replace("@NAME@", root.path[0])


def _words(node: Node) -> str:
    flags = [flag for argument in node.arguments for flag in argument.flags]
    return " ".join([*(child.path[-1] for child in node.children), *flags])


def _case(node: Node, words: str) -> str:
    return f'        "{" ".join(node.path)}") found={shlex.quote(words)} ;;'


def _valued(node: Node) -> str | None:
    """Options of a node that take the next word."""
    flags = [flag for argument in node.arguments if argument.metavar for flag in argument.flags]
    return f"        {'|'.join(_key(node, flag) for flag in flags)}) return 0 ;;" if flags else None


def _key(node: Node, flag: str) -> str:
    return f'"{" ".join(node.path)} {flag}"'


def _value_cases(nodes: list[Node]) -> list[str]:
    return [
        f"        {'|'.join(_key(node, flag) for flag in argument.flags)}) {action} ;;"
        for node in nodes
        for argument in node.arguments
        if argument.flags and argument.metavar and (action := _action(node, argument))
    ]


def _positional(node: Node) -> str | None:
    for argument in node.arguments:
        if not argument.flags and (action := _action(node, argument)):
            return f'        "{" ".join(node.path)}") {action} ;;'
    return None


def _action(node: Node, argument: Argument) -> str | None:
    """What to offer for a value: fixed words, names from a glob, files or directories."""
    if argument.choices:
        return f"found={shlex.quote(' '.join(argument.choices))}"
    what = argument.metavar
    if what == "NAME" and len(node.path) == 3:
        what = _BY_COMMAND.get(node.path[1], what)
    if what in _GLOBS:
        return f"_@NAME@_names {_GLOBS[what]}"
    return {"FILE": 'kind="file"', "DIR": 'kind="directory"'}.get(what)


_TABLES = """\
# Sets found (what may come) and kind (file, directory or nothing) for the found before the cursor.
_@NAME@_names() {{
    local entry
    found=""
    for entry in "$@"; do
        [ -e "$entry" ] || continue
        entry="${{entry##*/}}"
        entry="${{entry%.json}}"
        found="$found ${{entry#gpu}}"
    done
}}

# Does the option $2 of the command $1 take the next word?
_@NAME@_valued() {{
    case "$1 $2" in
{valued}
    esac
    return 1
}}

_@NAME@_offer() {{
    local at="@NAME@" previous="" word
    found="" kind=""
    for word in "$@"; do
        if [ -n "$previous" ]; then
            previous=""
        elif _@NAME@_valued "$at" "$word"; then
            previous="$word"
        else
            case "$at $word" in
            {descend}) at="$at $word" ;;
            esac
        fi
    done
    if [ -n "$previous" ]; then
        case "$at $previous" in
{values}
        esac
        return
    fi
    case "$current" in
    -*) ;;
    *)
        case "$at" in
{positionals}
        esac
        [ -n "$found$kind" ] && return
        ;;
    esac
    case "$at" in
{words}
    esac
}}
"""

_BASH = """\
# bash completion for @NAME@(8); made by `appliance completion bash`
@TABLES@
_@NAME@() {
    local found kind current="${COMP_WORDS[COMP_CWORD]}"
    _@NAME@_offer "${COMP_WORDS[@]:1:COMP_CWORD-1}"
    case "$kind" in
    file) mapfile -t COMPREPLY < <(compgen -f -- "$current") ;;
    directory) mapfile -t COMPREPLY < <(compgen -d -- "$current") ;;
    *) mapfile -t COMPREPLY < <(compgen -W "$found" -- "$current") ;;
    esac
}
complete -o filenames -F _@NAME@ @NAME@
"""

_ZSH = """\
#compdef @NAME@
# zsh completion for @NAME@(8); made by `appliance completion zsh`
@TABLES@
_@NAME@() {
    setopt localoptions shwordsplit nonomatch
    local kind current="${words[CURRENT]}"
    local -a before
    before=("${(@)words[2,CURRENT-1]}")
    local found
    _@NAME@_offer "${before[@]}"
    case "$kind" in
    file) _files ;;
    directory) _files -/ ;;
    *) compadd -- $found ;;
    esac
}
_@NAME@ "$@"
"""
