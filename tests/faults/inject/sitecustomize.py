"""Every Python process that has this folder on its path does what FAULT_RULES says.

The variable holds a JSON list of rules (see `injection.Rule`). A function that a rule names is
wrapped when its module has been executed, in whatever process that is: Dagster's step, a worker, a
rank of an engine. The product has no hooks for this.
"""

import functools
import json
import os
import re
import signal
import sys
import time

_RULES = json.loads(os.environ.get("FAULT_RULES", "[]"))
_HOLD_S = 0.02


class _Rule:
    def __init__(self, at, when, do, fired, match="", number=0):
        self.module, self.name = at.split(":")
        self.when, self.do, self.match = when, do, re.compile(match)
        self.fired, self.number = str(fired), number

    def concerns(self, arguments):
        if not self.match.search(" ".join(str(argument) for argument in arguments)):
            return False
        if self.do == "tell":
            line = f"{os.getpid()} {self.module}:{self.name} {' '.join(map(str, arguments))}\n"
            with open(self.fired, "a") as file:
                file.write(line.replace(os.linesep, " ")[:300].rstrip() + "\n")
            return False
        try:
            # Once, in whichever process comes first.
            descriptor = os.open(self.fired, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        os.write(descriptor, str(os.getpid()).encode())
        os.close(descriptor)
        return True

    def fire(self):
        if self.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.do == "kill-launcher":
            os.kill(int(os.environ["TENSORIZE_ASSETS_PARENT_PID"]), signal.SIGKILL)
            # No further than here, until it finds its step gone.
            while True:
                time.sleep(_HOLD_S)
        elif self.do == "error":
            raise OSError(self.number, os.strerror(self.number))
        elif self.do == "hold":
            parent = os.getppid()
            # Not for ever: a test that failed asks for nothing any more.
            while not os.path.exists(self.fired + ".go") and os.getppid() == parent:
                time.sleep(_HOLD_S)


def _path(argument):
    """Of an open file its path."""
    if not isinstance(argument, int):
        return argument
    try:
        return os.readlink(f"/proc/self/fd/{argument}")
    except OSError:
        return argument


def _wrapped(function, rules, is_method, in_os):
    @functools.wraps(function)
    def call(*arguments, **named):
        shown = (*(arguments[1:] if is_method else arguments), *named.values())
        if in_os:
            shown = [_path(argument) for argument in shown]
        for rule in rules:
            if rule.when == "before" and rule.concerns(shown):
                rule.fire()
        result = function(*arguments, **named)
        for rule in rules:
            if rule.when == "after" and rule.concerns(shown):
                rule.fire()
        return result

    return call


def _wrap(module, rules):
    for name in {rule.name for rule in rules}:
        owner, last = module, name
        while "." in last:
            first, _, last = last.partition(".")
            owner = getattr(owner, first)
        its = [rule for rule in rules if rule.name == name]
        setattr(owner, last, _wrapped(getattr(owner, last), its, "." in name, module is os))


class _Finder:
    """Finds as importlib does, and has the rules' modules changed once they are executed."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        rules = [rule for rule in _ALL if rule.module == fullname]
        if not rules:
            return None
        for finder in sys.meta_path:
            spec = None if finder is _Finder else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                break
        else:
            return None
        loader = spec.loader
        executed = loader.exec_module

        def exec_module(module):
            executed(module)
            _wrap(module, rules)

        loader.exec_module = exec_module
        return spec


_ALL = [_Rule(**rule) for rule in _RULES]
if _ALL:
    sys.meta_path.insert(0, _Finder)
    if at_once := [rule for rule in _ALL if rule.module == "os"]:
        _wrap(os, at_once)
