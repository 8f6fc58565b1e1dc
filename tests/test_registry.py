"""Names of classes that are the same in every process, and which classes come in how."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import gc
import os
import subprocess
import sys
import textwrap
import types
import typing
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, Optional, TypeVar

import pydantic
import pytest
from typing_extensions import TypedDict

from dalsegno import registry
from dalsegno.core.codec import decode, encode, to_tree
from dalsegno.errors import CodecError, DefinitionError
from dalsegno.registry import (
    RecordedError,
    class_name,
    exception_class,
    exception_name,
    module_name,
    name_of,
    register,
    register_reachable,
    register_signature,
    resolve,
)

# --- a script that is one file ----------------------------------------------------------------------------------------

APP = """
import dataclasses, enum, sys
from typing import NamedTuple
import pydantic
from dalsegno.core.codec import canonical, decode, decode_exception, encode, encode_exception, to_tree, dumps, loads
from dalsegno.registry import class_name, module_name, register


@register
class Color(enum.Enum):
    RED = 1


@register
@dataclasses.dataclass(frozen=True)
class Order:
    number: int
    color: Color = Color.RED


@register
class Review(pydantic.BaseModel):
    stars: int


@register
class Point(NamedTuple):
    x: int


class Refused(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


def value():
    return {"all": [Order(1), Review(stars=2), Point(3), {Order(4): Color.RED}]}


def main(recorded):
    print(module_name(__name__), class_name(Order), canonical(to_tree(value())).hex())
    print(dumps(encode_exception(Refused(code=7))).hex())
    if recorded:
        first, second = (bytes.fromhex(line) for line in recorded)
        assert decode(first) == value(), decode(first)
        assert [type(item) for item in decode(first)["all"]] == [Order, Review, Point, dict]
        try:
            raise decode_exception(loads(second))
        except Refused as error:
            assert (error.code, str(error)) == (7, "code 7")
    print(encode(value()).hex())


if __name__ == "__main__":
    main(sys.argv[1:])
"""


def run(arguments: list[str], cwd: Path, *recorded: str) -> list[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(cwd / "lib")]), "PYTHONHASHSEED": "random"}
    command = [sys.executable, *arguments, *recorded]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")


@pytest.mark.slow
def test_a_script_has_the_same_names_started_imported_or_run_with_m(tmp_path: Path) -> None:
    lib = tmp_path / "lib"
    lib.mkdir()
    (lib / "app.py").write_text(APP)
    (tmp_path / "elsewhere").mkdir()
    started = run(["lib/app.py"], tmp_path)
    assert started[0].startswith("app app:Order ")
    recorded = (started[2], started[1])
    assert run([str(lib / "app.py")], tmp_path, *recorded) == started
    assert run(["app.py"], lib, *recorded) == started
    assert run(["../lib/app.py"], tmp_path / "elsewhere", *recorded) == started
    assert run(["-m", "app"], tmp_path, *recorded) == started
    assert run(["-c", "import app, sys; app.main(sys.argv[1:])"], tmp_path, *recorded) == started
    spawned = """
        import multiprocessing, sys
        sys.argv = ["app.py"]
        import app

        if __name__ == "__main__":
            app.main([])
    """
    (tmp_path / "starter.py").write_text(textwrap.dedent(spawned))
    assert run(["starter.py"], tmp_path) == started


@pytest.mark.slow
def test_a_spawned_child_of_a_script_names_its_classes_alike(tmp_path: Path) -> None:
    script = """
        import dataclasses, multiprocessing
        from dalsegno.core.codec import decode, encode
        from dalsegno.registry import register

        @register
        @dataclasses.dataclass
        class Order:
            number: int

        def child(recorded, back):
            assert __name__ == "__mp_main__"
            assert decode(recorded) == Order(1)
            back.put(encode(decode(recorded)))

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            back = context.SimpleQueue()
            recorded = encode(Order(1))
            process = context.Process(target=child, args=(recorded, back))
            process.start()
            process.join()
            assert process.exitcode == 0
            assert back.get() == recorded
            print(recorded.decode())
    """
    (tmp_path / "job.py").write_text(textwrap.dedent(script))
    assert run(["job.py"], tmp_path)[0] == '{"$":"data","t":"job:Order","f":{"number":1}}'


@pytest.mark.slow
def test_a_package_run_with_m_keeps_its_full_name(tmp_path: Path) -> None:
    package = tmp_path / "lib" / "shop" / "agents"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "app.py").write_text(APP)
    started = run(["-m", "shop.agents.app"], tmp_path)
    assert started[0].startswith("shop.agents.app shop.agents.app:Order ")
    imported = "import sys; from shop.agents import app; app.main(sys.argv[1:])"
    assert run(["-c", imported], tmp_path, started[2], started[1]) == started


@pytest.mark.slow
def test_a_file_that_is_run_and_imported_is_told_apart(tmp_path: Path) -> None:
    script = """
        import dataclasses, sys
        from dalsegno.core.codec import to_tree
        from dalsegno.registry import register

        @register
        @dataclasses.dataclass
        class Order:
            number: int

        mine = Order
        if __name__ == "__main__":
            import twice
            to_tree(twice.Order(1))
            try:
                to_tree(mine(1))
            except ValueError as error:
                print(error)
    """
    (tmp_path / "twice.py").write_text(textwrap.dedent(script))
    assert "do not both run and import one file" in run(["twice.py"], tmp_path)[0]


def test_the_main_module_by_what_it_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert module_name("__main__") == "__main__"
    main.__file__ = "/somewhere/my app.py"
    assert module_name("__main__") == "my app"
    main.__spec__ = types.SimpleNamespace(name="__main__")  # type: ignore[assignment]
    assert module_name("__main__") == "my app"
    main.__spec__ = types.SimpleNamespace(name="pkg.__main__")  # type: ignore[assignment]
    assert module_name("__main__") == "pkg.__main__"
    assert module_name("pkg.mod") == "pkg.mod"


# --- register -------------------------------------------------------------------------------------------------------


def test_register_is_a_decorator_with_and_without_a_name_and_a_function() -> None:
    @register
    @dataclasses.dataclass
    class A:
        pass

    @register()
    @dataclasses.dataclass
    class B:
        pass

    @register(name="app:C")
    @dataclasses.dataclass
    class C:
        pass

    @dataclasses.dataclass
    class D:
        pass

    assert register(D) is D
    assert register(D, name="old:D") is D
    assert name_of(A) == f"{__name__}:{A.__qualname__}" == class_name(A)
    assert name_of(B) == class_name(B)
    assert name_of(C) == "app:C"
    assert resolve("app:C") is C
    assert name_of(D) == "old:D"
    assert resolve("old:D") is resolve(class_name(D)) is D
    assert encode(D()) == b'{"$":"data","t":"old:D","f":{}}'


def test_two_classes_under_one_name_are_refused() -> None:
    @dataclasses.dataclass
    class One:
        pass

    @dataclasses.dataclass
    class Two:
        pass

    register(One, name="app:Taken")
    with pytest.raises(DefinitionError, match=r"'app:Taken'.*One.*Two"):
        register(Two, name="app:Taken")
    register(One, name="app:Taken")
    assert resolve("app:Taken") is One


def test_a_new_definition_of_a_class_wins() -> None:
    def define() -> type:
        @register
        class Kind(enum.Enum):
            A = 1

        return Kind

    first, second = define(), define()
    assert first is not second
    assert resolve(class_name(first)) is second
    assert decode(encode(second.A)) is second.A  # type: ignore[attr-defined]
    with pytest.raises(CodecError, match="defined again"):
        encode(first.A)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "bad", [int, object, collections.OrderedDict, type("Plain", (), {}), list[int], "name", 3, None]
)
def test_what_cannot_be_recorded_cannot_be_registered(bad: Any) -> None:
    if bad is None:
        with pytest.raises(DefinitionError, match="non-empty string"):
            register(name="")(RecordedError)
        with pytest.raises(DefinitionError, match="non-empty string"):
            register(RecordedError, name=3)  # type: ignore[call-overload]
        return
    with pytest.raises(DefinitionError, match=r"cannot be recorded|takes a class"):
        register(bad)


def test_register_below_dataclass_teaches() -> None:
    with pytest.raises(DefinitionError, match="put @register above @dataclass"):

        @dataclasses.dataclass
        @register
        class Wrong:
            x: int


def test_the_classes_of_fields_come_with_a_registered_class() -> None:
    class Tint(enum.Enum):
        DARK = 1

    item = dataclasses.make_dataclass("Item", [("tint", Tint)])
    cart = dataclasses.make_dataclass("Cart", [("items", list[item])])  # type: ignore[valid-type]
    register(cart)
    assert decode(encode(cart([item(Tint.DARK)]))) == cart([item(Tint.DARK)])


# --- what is reachable ------------------------------------------------------------------------------------------------


class Deep(enum.Enum):
    A = 1


class Leaf(NamedTuple):
    deep: Deep


class InTyped(enum.Enum):
    A = 1


class Typed(TypedDict):
    x: InTyped


class Model(pydantic.BaseModel):
    leaf: Leaf | None = None
    later: Later | None = None
    _private: InPrivate | None = None


class Later(pydantic.BaseModel):
    typed: Typed


class InPrivate(enum.Enum):
    A = 1


@dataclasses.dataclass
class Tree:
    models: dict[str, list[Model]]
    left: Tree | None = None


class InLiteral(enum.Enum):
    A = 1
    B = 2


class InAnnotated(enum.Enum):
    A = 1


class InNewType(enum.Enum):
    A = 1


class InCallable(enum.Enum):
    A = 1


class InBound(enum.Enum):
    A = 1


class InArgument(enum.Enum):
    A = 1


class InMissing(enum.Enum):
    A = 1


_T = TypeVar("_T")
_B = TypeVar("_B", bound=InBound)
New = NewType("New", InNewType)


class Page(pydantic.BaseModel, Generic[_T]):
    items: list[_T]


@dataclasses.dataclass
class Partly:
    unknown: NowhereDefined  # type: ignore[name-defined]  # noqa: F821
    missing: InMissing


class Raised(Exception):
    pass


def registered(*classes: type) -> bool:
    return all(name_of(cls) is not None for cls in classes)


def test_everything_reachable_from_an_annotation_is_registered() -> None:
    everything = (Tree, Model, Leaf, Deep, Later, InTyped, InPrivate)
    assert not any(map(registered, everything))
    register_reachable(Optional[dict[str, tuple[Tree, ...]]])  # noqa: UP045
    assert registered(*everything)
    assert decode(encode(Tree({"a": [Model(leaf=Leaf(Deep.A))]}))).models["a"][0].leaf == Leaf(Deep.A)


@pytest.mark.parametrize(
    ("annotation", "classes"),
    [
        (Literal[InLiteral.A, "x"], [InLiteral]),
        (Annotated[InAnnotated, "note"], [InAnnotated]),
        (New, [InNewType]),
        (Callable[[InCallable], Awaitable[int]], [InCallable]),
        (_B, [InBound]),
        (Page[InArgument], [Page[InArgument], InArgument]),
        (type[Raised] | None, [Raised]),
        (Partly, [Partly, InMissing]),
    ],
)
def test_the_forms_of_annotations(annotation: Any, classes: list[type]) -> None:
    register_reachable(annotation)
    assert registered(*classes)


def test_annotations_that_are_nothing_are_ignored() -> None:
    odd: list[Any] = [None, ..., "Nowhere", "1/0", typing.Any, typing.ParamSpec("P"), 3, object(), [[]], typing.List]  # noqa: UP006
    for annotation in odd:
        register_reachable(annotation)


def test_the_signature_of_a_function_is_enough() -> None:
    @dataclasses.dataclass
    class Answer:
        text: str

    @dataclasses.dataclass
    class Question:
        text: str

    async def ask(question: Question, *others: list[Question]) -> Answer | None:
        return Answer(question.text)

    register_signature(ask)
    assert not registered(Question), "a local class that the function does not use cannot be seen in its annotations"
    assert registered(Answer)
    ask.__annotations__["question"] = Question
    for wrapped in (functools.partial(ask, Question("a")), types.MethodType(ask, object())):
        register_signature(wrapped)
    assert not registered(Question), "each function is looked at once"


def test_callable_objects_methods_and_wrapped_functions() -> None:
    class One(enum.Enum):
        A = 1

    class Two(enum.Enum):
        A = 1

    class Three(enum.Enum):
        A = 1

    class Tool:
        def __call__(self) -> Any: ...

        def method(self) -> Any: ...

    Tool.__call__.__annotations__["return"] = One
    Tool.method.__annotations__["return"] = Two

    def inner() -> Any: ...

    inner.__annotations__["return"] = Three

    @functools.wraps(inner)
    def outer(*args: Any) -> Any: ...

    register_signature(Tool())
    register_signature(functools.partial(Tool().method))
    register_signature(outer)
    assert registered(One, Two, Three)


def test_register_signature_never_raises_and_keeps_no_function_alive() -> None:
    class Hostile:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    odd: list[Any] = [None, 3, len, print, int, Hostile(), Hostile, object(), "".join, functools.partial(len)]
    for function in odd:
        register_signature(function)

    def temporary() -> int:
        return 1

    register_signature(temporary)
    seen = weakref.ref(temporary)
    del temporary
    gc.collect()
    assert seen() is None


def test_a_class_that_is_defined_after_the_function_is_found_when_it_is_needed(tmp_path: Path) -> None:
    module = types.ModuleType("later_module")
    source = """
        from __future__ import annotations
        import dataclasses

        def answer() -> list[Answer]: ...
    """
    later = """
        @dataclasses.dataclass
        class Answer:
            x: int
    """
    sys.modules["later_module"] = module
    try:
        exec(textwrap.dedent(source), vars(module))
        register_signature(module.answer)
        assert registry._registry.unresolved
        exec(textwrap.dedent(later), vars(module))
        assert resolve("later_module:Answer") is module.Answer
        assert decode(encode([module.Answer(1)])) == [module.Answer(1)]
        assert ("list[Answer]", id(vars(module))) not in registry._registry.unresolved
    finally:
        del sys.modules["later_module"]


def test_resolving_names_nobody_registered() -> None:
    for name in ("os:system", "subprocess:Popen", "builtins:dict", f"{__name__}:NotRegistered", "", ":", "x"):
        with pytest.raises(CodecError, match="is not registered"):
            resolve(name)


class NotRegistered(enum.Enum):
    A = 1


def test_a_class_is_not_registered_by_existing() -> None:
    assert name_of(NotRegistered) is None
    with pytest.raises(CodecError, match="NotRegistered"):
        to_tree(NotRegistered.A)


# --- exception classes ------------------------------------------------------------------------------------------------


def test_exception_classes_are_found_by_their_own_name_only() -> None:
    for cls in (ValueError, Raised, CodecError, pydantic.ValidationError, RecordedError, subprocess.CalledProcessError):
        assert exception_class(exception_name(cls)) is cls
    for name in (
        "os:error",  # another name of OSError
        "builtins:IOError",
        "builtins:int",
        "builtins:len",
        f"{__name__}:CodecError",
        f"{__name__}:Tree",
        f"{__name__}:Raised.__class__",
        "not_imported_anywhere:Error",
        "builtins",
        "",
        ":",
        "..:",
    ):
        assert exception_class(name) is None
    assert exception_name(RecordedError) == "dalsegno:RecordedError"


def test_looking_for_an_exception_triggers_no_lazy_module(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError("a lazy import was triggered")

    monkeypatch.setitem(sys.modules, "lazy_module", Lazy("lazy_module"))
    monkeypatch.setitem(sys.modules, "no_module", None)
    monkeypatch.setitem(sys.modules, "odd_module", 3)
    for module in ("lazy_module", "no_module", "odd_module"):
        assert exception_class(f"{module}:Error") is None
