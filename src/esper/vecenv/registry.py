"""Make batched environments from a name, a function, or an environment.

A name is that of a built-in environment ("cue"), a Gymnasium id ("CartPole-v1"), or `package.module:function` for the user's own function
or class, which makes one environment; modules are also looked up in the current folder. A function with a parameter `num_envs` makes all
environments at once.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from esper.text_table import did_you_mean
from esper.vecenv.builtin import BUILTIN
from esper.vecenv.contract import VecEnv, is_vec_env

if TYPE_CHECKING:
    import gymnasium

EnvSource = Any  # a name, a function, a Gymnasium environment or vector environment, or a VecEnv
Wrapper = Callable[[Any], Any] | str  # function from one Gymnasium environment to another, or its name "package.module:function"

_GIVEN: dict[str, EnvSource] = {}  # names that are defined only inside `named`


def make(
    env: EnvSource,
    num_envs: int,
    *,
    seed: int | None = None,
    device: str | torch.device = "cpu",
    wrappers: Sequence[Wrapper] = (),
    **kwargs: Any,
) -> VecEnv:
    """Make `num_envs` environments from a name such as "cue", "CartPole-v1" or "mycode:make_env", a function, or an environment.

    If `env` is one Gymnasium environment, the batch consists of it and copies of it. If it is a VecEnv or a Gymnasium vector environment,
    it must have `num_envs` environments. `wrappers` are applied to each single Gymnasium environment, the first one innermost. `seed` is
    used by the first `reset()` that is called without one. `kwargs` go to the built-in environment, to `gymnasium.make_vec`, or to the
    function. Gymnasium's environments run on the CPU; `vectorization_mode="async"` runs each in its own process.

    >>> make("cue", 2, delay=5).observation_spec
    {'obs': TensorSpec(shape=(5,), dtype='float32')}
    """
    if isinstance(env, str):
        env = _GIVEN.get(env, env)
    if isinstance(env, str) and env in BUILTIN:
        if wrappers:
            raise ValueError(f"{env!r} is a built-in environment, and wrappers go around Gymnasium environments; leave out the wrappers")
        return BUILTIN[env].factory(num_envs, device=device, seed=0 if seed is None else seed, **kwargs)
    if is_vec_env(env):
        _check_batch(env, num_envs, wrappers)
        return env
    _check_gymnasium(env)
    from esper.vecenv.gymnasium import from_gymnasium

    if torch.device(device).type != "cpu":
        raise ValueError(f"{env!r} is a Gymnasium environment, which runs on the CPU; got device={str(device)!r}, use device='cpu'")
    made = _make_gymnasium(env, num_envs, [named_object(each) if isinstance(each, str) else each for each in wrappers], kwargs)
    return made if is_vec_env(made) else from_gymnasium(made, seed=seed)


def _make_gymnasium(env: EnvSource, num_envs: int, wrappers: Sequence[Callable[[Any], Any]], kwargs: dict[str, Any]) -> Any:
    """Return a Gymnasium vector environment, or the result of the user's own function."""
    import gymnasium

    source = _function_of(env) if isinstance(env, str) else env
    if isinstance(source, gymnasium.vector.VectorEnv):
        _check_batch(source, num_envs, wrappers)
        return source
    if isinstance(source, gymnasium.Env):
        source = _itself_and_copies(source)
    if callable(source):
        return _call(source, num_envs, wrappers, kwargs)
    if not isinstance(source, str):
        raise ValueError(
            f"an environment is a name, a function that makes one, or an environment of Gymnasium; got a {type(source).__name__}"
        )
    if wrappers:  # a natively vectorised environment could not apply them
        kwargs = {"vectorization_mode": "sync", **kwargs, "wrappers": wrappers}
    try:
        # Without a given mode, `make_vec` uses the natively vectorised environment if there is one, else "sync".
        if kwargs.get("vectorization_mode", None if gymnasium.spec(source).vector_entry_point else "sync") in ("sync", "async"):
            # Gymnasium's default, NEXT_STEP, spends one step per episode on the reset: half of all steps if episodes have one step.
            same_step = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
            kwargs = {**kwargs, "vector_kwargs": {**same_step, **(kwargs.get("vector_kwargs") or {})}}
        return gymnasium.make_vec(source, num_envs=num_envs, **kwargs)
    except gymnasium.error.UnregisteredEnv as error:
        raise ValueError(_unknown(source)) from error


def _call(function: Callable[..., Any], num_envs: int, wrappers: Sequence[Callable[[Any], Any]], kwargs: dict[str, Any]) -> Any:
    """Call the user's function, which makes all environments at once, or one at a time for a Gymnasium vector environment."""
    from gymnasium import Env
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

    if "num_envs" in inspect.signature(function).parameters:
        made = function(num_envs=num_envs, **kwargs)
        if not is_vec_env(made) and not isinstance(made, VectorEnv):
            raise ValueError(f"{_name_of(function)} takes num_envs, so it must make a VectorEnv or a VecEnv; got a {type(made).__name__}")
        _check_batch(made, num_envs, wrappers)
        return made
    kwargs = dict(kwargs)
    mode = kwargs.pop("vectorization_mode", "sync")
    if mode not in ("sync", "async"):
        raise ValueError(f"vectorization_mode is 'sync' or 'async' for a function that makes one environment; got {mode!r}")

    def make_one() -> Any:
        env = function(**kwargs)
        if not isinstance(env, Env):
            raise ValueError(f"{_name_of(function)} must make a gymnasium.Env; got a {type(env).__name__}")
        for wrapper in wrappers:
            env = wrapper(env)
        return env

    return (SyncVectorEnv if mode == "sync" else AsyncVectorEnv)([make_one] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def make_single(env: EnvSource, *, wrappers: Sequence[Wrapper] = (), render_mode: str | None = None, **kwargs: Any) -> Any:
    """Make one Gymnasium environment from a name, a function or an environment, and apply the wrappers.

    `render_mode` is passed to a function only if it accepts such a keyword.
    """
    if isinstance(env, str):
        env = _GIVEN.get(env, env)
    if isinstance(env, str) and env in BUILTIN:
        raise ValueError(f"{env!r} is a built-in environment, which exists only as a batch; name an environment of Gymnasium")
    _check_gymnasium(env)
    import gymnasium

    source = _function_of(env) if isinstance(env, str) else env
    kwargs.pop("vectorization_mode", None)
    if isinstance(source, str):
        try:
            made = gymnasium.make(source, render_mode=render_mode, **kwargs)
        except gymnasium.error.UnregisteredEnv as error:
            raise ValueError(_unknown(source)) from error
    elif callable(source):
        parameters = inspect.signature(source).parameters.values()
        if any(each.name == "render_mode" or each.kind is each.VAR_KEYWORD for each in parameters):
            kwargs["render_mode"] = render_mode
        made = source(**kwargs)
    else:
        made = source
    if not isinstance(made, gymnasium.Env):
        raise ValueError(f"a single environment is a gymnasium.Env; got a {type(made).__name__}")
    for wrapper in wrappers:
        made = (named_object(wrapper) if isinstance(wrapper, str) else wrapper)(made)
    return made


def _itself_and_copies(env: gymnasium.Env[Any, Any]) -> Callable[[], Any]:
    """Return a function whose first call returns `env` itself, and later calls return copies of it."""
    is_given = False

    def make_one() -> Any:
        nonlocal is_given
        if not is_given:
            is_given = True
            return env
        try:
            return copy.deepcopy(env)
        except Exception as error:  # windows, sockets or handles of a simulator cannot be copied, and raise anything
            raise ValueError(
                f"{env} cannot be copied ({type(error).__name__}: {error}); give a function that makes the environment"
            ) from error

    return make_one


def _check_batch(env: Any, num_envs: int, wrappers: Sequence[Wrapper]) -> None:
    if env.num_envs != num_envs:
        raise ValueError(f"the given environment is a batch of {env.num_envs}, but {num_envs} were asked for; use num_envs={env.num_envs}")
    if wrappers:
        raise ValueError("wrappers go around single environments, but the given environment is a batch; apply them where it is made")


@contextlib.contextmanager
def named(name: str, env: EnvSource | None) -> Iterator[None]:
    """Make environments from `env` wherever `make(name, ...)` is called inside the context. None changes nothing."""
    if env is None:
        yield
        return
    import gymnasium

    if is_vec_env(env) or isinstance(env, gymnasium.vector.VectorEnv):
        raise ValueError("a run makes environments for training and for evaluation; give a function that makes a batch: make_env(num_envs)")
    # Use one function for all calls of `make`: training, which comes first, gets the environment itself, and evaluation gets copies.
    _GIVEN[name] = _itself_and_copies(env) if isinstance(env, gymnasium.Env) else env
    try:
        yield
    finally:
        del _GIVEN[name]


def named_object(name: str) -> Any:
    """Return the object named `package.module:name`. The current folder is importable."""
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise ValueError(f"{name!r}: expected package.module:name, such as mycode:make_env")
    found = _attribute_of(module_name, attribute)
    if found is None:
        raise ValueError(f"{name!r}: the module {module_name} has no {attribute!r}")
    return found


def _unknown(name: str) -> str:
    """Return the message for an environment that does not exist: the nearest function of the user's module, or the nearest known name."""
    import gymnasium

    module_name, colon, attribute = name.partition(":")
    if colon and module_name in sys.modules:
        functions = [own for own, value in vars(sys.modules[module_name]).items() if callable(value) and not own.startswith("_")]
        hint = did_you_mean(attribute, functions, otherwise=f"it has {', '.join(functions) or 'no function'}")
        return f"{module_name} has no {attribute}; {hint}"
    return f"no environment named {name!r}; {_nearest(name, [*BUILTIN, *gymnasium.registry])}"


def _function_of(name: str) -> Any:
    """Return the function that `package.module:function` names, or the name itself if it is a Gymnasium id."""
    module_name, colon, attribute = name.partition(":")
    if not colon:
        return name
    return _attribute_of(module_name, attribute) or name  # a Gymnasium id may have the form "module:id" too


def _attribute_of(module_name: str, attribute: str) -> Any:
    """Import a module, also from the current folder, and return its attribute; None if it has no such attribute."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return getattr(importlib.import_module(module_name), attribute, None)
    except ModuleNotFoundError as error:
        # The module may exist and fail to import another one; that error must not be hidden.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"there is no module {error.name!r}, neither in {here} nor among the installed packages; run esper in the folder of your code"
        ) from error


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _check_gymnasium(env: EnvSource) -> None:
    try:
        import gymnasium  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{env!r} is not a built-in environment ({', '.join(sorted(BUILTIN))}), and Gymnasium is not installed: "
            "pip install 'esper-grow[gym]'"
        ) from error


def _nearest(wanted: str, known: list[str]) -> str:
    by_lower = {name.lower(): name for name in known}
    near = [by_lower[name] for name in get_close_matches(wanted.lower(), by_lower, n=3, cutoff=0.5)]
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"the built-in ones are {sorted(BUILTIN)}"
