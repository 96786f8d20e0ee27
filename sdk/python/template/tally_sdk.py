"""What a policy in Python is written with: `policy` for its class, `Config` for its
configuration, TOML of whole numbers and booleans, and `expect` for a state that it restores.

    config = Config(text)
    quiet_us = config.integer("quiet_us", 100, 0, 1_000_000)
    config.finish()  # what nobody asked for is refused

Every error of a configuration is an `Err` with a message, which `init` passes on to the
operator.
"""

import functools
import tomllib

from componentize_py_types import Err
from wit_world.imports import host
from wit_world.imports.types import Level


def policy(scheduler):
    """Make one object of a class the policy. Without it every call would get a new one.

    Also has the core's log say which exception ended a call: to the core it is a trap.
    """

    def tells(method):
        @functools.wraps(method)
        def call(self, *arguments):
            try:
                return method(self, *arguments)
            except Err:
                raise
            except BaseException as error:
                # Not by `traceback`: it reads source files, and there are none.
                where = error.__traceback__
                while where.tb_next is not None:
                    where = where.tb_next
                name = where.tb_frame.f_code.co_name
                host.log(Level.ERROR, f"{error!r} in {name}, line {where.tb_lineno}")
                raise

        return call

    for name in ("init", "decide", "on_event", "snapshot", "restore"):
        if hasattr(scheduler, name):
            setattr(scheduler, name, tells(getattr(scheduler, name)))
    one = scheduler()
    scheduler.__new__ = staticmethod(lambda cls: one)
    return scheduler


def expect(saved, form, version_max):
    """Refuse a state that is not of this format, or of a later version than this."""
    if saved.format != form:
        raise Err(f"saved by {saved.format!r}, expected {form!r}")
    if saved.version > version_max:
        raise Err(f"of version {saved.version}, expected at most {version_max}")


class Config:
    def __init__(self, text):
        try:
            self._left = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise Err(f"the configuration is not TOML: {error}") from None
        self._known = []

    def _take(self, key, default, kind, expected):
        self._known.append(key)
        value = self._left.pop(key, default)
        # A boolean is an integer to Python, and not to an operator.
        if type(value) is not kind:
            raise Err(f"{key} is {value!r}: expected {expected}")
        return value

    def integer(self, key, default, least, most):
        """A whole number from `least` to `most`."""
        expected = f"a whole number from {least} to {most}"
        value = self._take(key, default, int, expected)
        if not least <= value <= most:
            raise Err(f"{key} is {value}: expected {expected}")
        return value

    def boolean(self, key, default):
        """`true` or `false`."""
        return self._take(key, default, bool, "true or false")

    def finish(self):
        """Refuse what was given and not asked for."""
        for key in self._left:
            raise Err(f"unknown key {key}; known keys: {', '.join(self._known)}")
