"""The codec on objects: their state comes back without their constructors, and a changed class is a clear error."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
from collections.abc import Iterator
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import pydantic
import pydantic.dataclasses
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, RootModel

from dalsegno import registry
from dalsegno.core import codec_classes
from dalsegno.core.codec import MAX_DEPTH, Tree, canonical, decode, encode, from_tree, to_tree
from dalsegno.errors import CodecError
from dalsegno.registry import register


def again(value: Any) -> Any:
    found = decode(encode(value))
    assert type(found) is type(value)
    assert found is not value or isinstance(value, enum.Enum)
    assert canonical(to_tree(found)) == canonical(to_tree(value))
    return found


# --- enums ----------------------------------------------------------------------------------------------------------


@register
class Color(enum.Enum):
    RED = 1
    CRIMSON = 1  # noqa: PIE796
    BLUE = "blue"
    LIST = [1]  # noqa: RUF012


@register
class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@register
class Word(enum.StrEnum):
    YES = "yes"


@register
class Right(enum.Flag):
    READ = 1
    WRITE = 2
    ALL = 3


@register
class Wide(enum.IntFlag, boundary=enum.KEEP):
    A = 1
    B = 2**70


@pytest.mark.parametrize(
    "member",
    [*Color, Color.CRIMSON, Level.HIGH, Word.YES, Right.READ, Right.ALL, Right(0), Wide.B, Wide(2**71 | 1), Wide(0)],
    ids=repr,
)
def test_members_come_back_as_the_same_object(member: enum.Enum) -> None:
    found = decode(encode({"k": [member]}))["k"][0]
    assert type(found) is type(member)
    assert found == member
    assert isinstance(member, enum.Flag) or found is member
    assert decode(encode({(member.name,): 1})) == {(member.name,): 1}


def test_enums_as_keys_are_not_their_values() -> None:
    value = {Level.LOW: "level", 2: "int", Word.YES: "word"}
    found = again(value)
    assert [type(key) for key in found] == [Level, int, Word]


def test_a_member_that_is_gone_is_named() -> None:
    tree = to_tree(Color.BLUE)
    assert isinstance(tree, dict)
    with pytest.raises(CodecError, match=r"'GREEN' of the enum .*Color.*RED.*alias"):
        from_tree({**tree, "v": "GREEN"})
    bads: list[Any] = [[], None, 1]
    for bad in bads:
        with pytest.raises(CodecError):
            from_tree({**tree, "v": bad})


def test_a_flag_that_is_gone_is_named() -> None:
    tree = to_tree(Right.READ)
    assert isinstance(tree, dict)
    with pytest.raises(CodecError, match=r"flag .*Right"):
        from_tree({**tree, "v": 64})


def test_an_undeclared_member_is_refused() -> None:
    stray = object.__new__(Color)
    stray._name_, stray._value_ = "STRAY", 9
    with pytest.raises(CodecError, match="not a declared member"):
        to_tree(stray)


# --- dataclasses ----------------------------------------------------------------------------------------------------

calls: list[str] = []


@register
@dataclasses.dataclass
class Order:
    number: int
    lines: list[Any] = dataclasses.field(default_factory=list)
    price: Decimal = Decimal("1.10")
    color: Color = Color.RED
    kind: ClassVar[str] = "order"

    def __post_init__(self) -> None:
        calls.append("post_init")


@register
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    a: int
    b: tuple[int, ...] = ()
    c: str = dataclasses.field(default="c", compare=False, repr=False)


@register
@dataclasses.dataclass(slots=True, weakref_slot=True)
class Computed:
    width: int
    given: dataclasses.InitVar[int]
    area: int = dataclasses.field(init=False)
    never: int = dataclasses.field(init=False)
    fallback: int = dataclasses.field(init=False, default=7)

    def __post_init__(self, given: int) -> None:
        calls.append("post_init")
        self.area = self.width * given


class Base:
    __slots__ = ("__hidden", "_low")

    def __init__(self) -> None:
        raise AssertionError("the user's code was run")

    def hide(self, value: object) -> None:
        self.__hidden = value

    def hidden(self) -> object:
        return self.__hidden


@register
@dataclasses.dataclass
class Private(Base):
    x: int

    @functools.cached_property
    def double(self) -> int:
        return self.x * 2


@register
@dataclasses.dataclass
class WithProperty:
    x: int

    @property  # type: ignore[no-redef]
    def x(self) -> int:
        return self._x

    @x.setter
    def x(self, value: int) -> None:
        calls.append("setter")
        self._x = value


_T = TypeVar("_T")


@register
@dataclasses.dataclass
class Box(Generic[_T]):
    item: _T


@register
@dataclasses.dataclass
class Node:
    value: int
    next: Node | None = None


@pytest.fixture(autouse=True)
def no_user_code_runs() -> Iterator[None]:
    calls.clear()
    yield
    calls.clear()


DATA: list[Any] = [
    Order(1, [(1, 2), {3}], Decimal("NaN")),
    Frozen(a=1, b=(1, 2), c="other"),
    Box(Box[Any]({1: Order(2)})),
    Node(1, Node(2, Node(3))),
]


@pytest.mark.parametrize("value", DATA, ids=lambda value: type(value).__name__)
def test_dataclasses_come_back_without_running_user_code(value: Any) -> None:
    calls.clear()
    found = again(value)
    assert calls == []
    assert repr(found) == repr(value)
    for field in dataclasses.fields(value):
        assert type(getattr(found, field.name)) is type(getattr(value, field.name))
    assert list(vars(found)) == list(vars(value)) if hasattr(value, "__dict__") else True


def test_compared_or_not_every_field_comes_back() -> None:
    assert again(Frozen(a=1, c="kept")).c == "kept"


def test_unset_fields_stay_unset() -> None:
    value = Computed(2, 3)
    calls.clear()
    found = again(value)
    assert calls == []
    assert (found.width, found.area, found.fallback) == (2, 6, 7)
    with pytest.raises(AttributeError):
        found.never  # noqa: B018


def test_private_state_comes_back_and_cached_properties_are_no_state() -> None:
    value = Private(3)
    value.hide([1])
    value._low = 2  # type: ignore[attr-defined]
    value.note = ("added",)  # type: ignore[attr-defined]
    before = canonical(to_tree(value))
    assert value.double == 6
    assert canonical(to_tree(value)) == before
    found = again(value)
    assert found.hidden() == [1]
    assert found._low == 2
    assert found.note == ("added",)
    assert "double" not in vars(found)


def test_a_field_that_is_a_property_keeps_its_state() -> None:
    value = WithProperty(5)
    calls.clear()
    found = again(value)
    assert calls == []
    assert found.x == 5


def test_a_dataclass_on_top_of_a_builtin_is_refused() -> None:
    @register
    @dataclasses.dataclass
    class Bag(dict):
        x: int = 1

    with pytest.raises(CodecError, match=r"Bag.*on top of a builtin"):
        to_tree(Bag())


def test_setting_state_runs_no_code_of_the_user() -> None:
    @register
    @dataclasses.dataclass
    class Guarded:
        x: int

        def __setattr__(self, name: str, value: object) -> None:
            calls.append(name)
            object.__setattr__(self, name, value)

        def __getattribute__(self, name: str) -> Any:
            calls.append(name)
            return object.__getattribute__(self, name)

    tree = to_tree(Guarded(1))
    calls.clear()
    found = from_tree(tree)
    assert calls == []
    assert found == Guarded(1)


def test_the_path_names_fields() -> None:
    with pytest.raises(CodecError, match=r"cannot record result\['o'\]\.lines\[1\]\.item: .*object"):
        to_tree({"o": Order(1, [0, Box(object())])}, root="result")


def test_deep_objects_are_refused_clearly() -> None:
    def chain(length: int) -> Node:
        node = Node(0)
        for number in range(length):
            node = Node(number, node)
        return node

    fits = MAX_DEPTH // 2 - 2
    assert repr(decode(encode(chain(fits)))) == repr(chain(fits))
    with pytest.raises(CodecError, match="nested"):
        to_tree(chain(MAX_DEPTH))
    loop = Node(1)
    loop.next = loop
    with pytest.raises(CodecError, match="contains itself"):
        to_tree(loop)


# --- classes that changed since ---------------------------------------------------------------------------------------


def redefined(tree: Tree, cls: type, name: str) -> Tree:
    """The tree as if it had been recorded under the name of ``cls``."""
    register(cls, name=name)
    assert isinstance(tree, dict)
    return {**tree, "t": name}


def test_a_gained_field_takes_its_default() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Order2:
        number: int
        extra: list[int] = dataclasses.field(default_factory=lambda: [1])
        more: str = "m"
        lines: Any = None
        price: Any = None
        color: Any = None

    found = from_tree(redefined(to_tree(Order(1)), Order2, "changed:Order2"))
    assert found == Order2(1, [1], "m", [], Decimal("1.10"), Color.RED)


def test_a_gained_field_without_default_and_a_lost_field_are_named() -> None:
    @dataclasses.dataclass
    class Order3:
        number: int
        lines: Any
        price: Any
        color: Any
        customer: str

    @dataclasses.dataclass
    class Order4:
        number: int
        price: Any

    with pytest.raises(CodecError, match=r"'changed:Order3'.*gained the field 'customer'"):
        from_tree(redefined(to_tree(Order(1)), Order3, "changed:Order3"))
    with pytest.raises(CodecError, match=r"'changed:Order4'.*its field 'lines'"):
        from_tree(redefined(to_tree(Order(1)), Order4, "changed:Order4"))


def test_a_class_of_another_kind_is_named() -> None:
    for tree, cls in [(to_tree(Order(1)), Color), (to_tree(Color.RED), Order), (to_tree(Right.READ), Color)]:
        with pytest.raises(CodecError, match="changed:kind"):
            from_tree(redefined(tree, cls, f"changed:kind-{cls.__name__}"))


def test_private_state_with_no_place_left_is_named() -> None:
    @dataclasses.dataclass(slots=True)
    class Private2:
        x: int

    value = Private(1)
    value.note = 1  # type: ignore[attr-defined]
    with pytest.raises(CodecError, match=r"changed:Private2.*'note'"):
        from_tree(redefined(to_tree(value), Private2, "changed:Private2"))


def test_an_older_definition_of_a_class_is_refused() -> None:
    def define() -> type:
        @register
        @dataclasses.dataclass
        class Again:
            x: int

        return Again

    old, new = define(), define()
    assert from_tree(to_tree(new(1))) == new(1)
    with pytest.raises(CodecError, match="defined again"):
        to_tree(old(1))


def test_a_class_that_is_not_registered_teaches() -> None:
    @dataclasses.dataclass
    class Stranger:
        x: int

    class Model(BaseModel):
        x: int

    class Shade(enum.Enum):
        DARK = 1

    class Point(NamedTuple):
        x: int

    class Plain:
        pass

    for value in (Stranger(1), Model(x=1), Shade.DARK, Point(1)):
        with pytest.raises(CodecError, match=rf"result: .*{type(value).__name__}.*@dalsegno\.register"):
            to_tree(value, root="result")
    with pytest.raises(CodecError, match="Plain"):
        to_tree(Plain())
    register(Stranger)
    assert again(Stranger(1)) == Stranger(1)
    with pytest.raises(CodecError, match=r"'nowhere:Class'.*not registered.*register\(name='nowhere:Class'\)"):
        from_tree({"$": "data", "t": "nowhere:Class", "f": {}})


def test_damaged_objects_are_errors() -> None:
    data: Any = to_tree(Order(1))
    model: Any = to_tree(Review(stars=1))
    change: Any
    for change in ({"f": []}, {"f": None}, {"f": {"$": "tuple", "v": []}}, {"unset": "ab"}, {"unset": [1]}, {"x": 1}):
        for tree in (data, model):
            with pytest.raises(CodecError):
                from_tree({**tree, **change})
    for change in ({"set": None}, {"set": [1]}, {"private": {"_gone": 1}}, {"extra": {"a": 1}}, {"private": []}):
        with pytest.raises(CodecError):
            from_tree({**model, **change})


# --- named tuples ---------------------------------------------------------------------------------------------------


@register
class Point(NamedTuple):
    x: int
    y: Any = 2


@register
class Rich(Point):
    """Has a ``__dict__``, and a constructor that must not run."""

    def __new__(cls, *args: Any) -> Rich:
        calls.append("new")
        return super().__new__(cls, *args)


Old = register(collections.namedtuple("Old", "a b"))


def test_named_tuples_come_back() -> None:
    old: Any = Old
    for value in (Point(1, [2]), Point(1, Point(2, ())), old("a", {1: 2})):
        assert again(value) == value
    assert decode(encode({Point(1, 2): 1, (1, 2, 3): 2})) == {Point(1, 2): 1, (1, 2, 3): 2}
    assert canonical(to_tree(Point(1, 2))) != canonical(to_tree((1, 2)))


def test_the_attributes_of_a_named_tuple_come_back_without_its_constructor() -> None:
    value = Rich(1, 2)
    value.label = "r"  # type: ignore[attr-defined]
    calls.clear()
    found = again(value)
    assert calls == []
    assert found == value
    assert found.label == "r"


def test_changed_named_tuples() -> None:
    class Point3(NamedTuple):
        z: int
        x: int
        y: int

    class Point2(NamedTuple):
        y: int
        x: int
        z: int = 9

    class Point1(NamedTuple):
        x: int

    tree = to_tree(Point(1, 2))
    assert from_tree(redefined(tree, Point2, "changed:Point2")) == Point2(2, 1, 9)
    with pytest.raises(CodecError, match=r"changed:Point3.*gained the field 'z'"):
        from_tree(redefined(tree, Point3, "changed:Point3"))
    with pytest.raises(CodecError, match=r"changed:Point1.*its field 'y'"):
        from_tree(redefined(tree, Point1, "changed:Point1"))


# --- pydantic models --------------------------------------------------------------------------------------------------


@register
class Review(BaseModel):
    stars: int
    when: datetime | None = None
    tags: set[str] = Field(default_factory=set)
    color: Color = Color.RED
    nested: Review | None = None
    anything: Any = None
    _seen: list[int] = PrivateAttr(default_factory=list)
    _unset: int = PrivateAttr()

    @pydantic.field_validator("stars")
    @classmethod
    def check_stars(cls, stars: int) -> int:
        calls.append("validator")
        if stars > 5:
            raise ValueError("too many stars")
        return stars

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @functools.cached_property
    def double(self) -> int:
        return self.stars * 2

    def model_post_init(self, context: Any) -> None:
        calls.append("post_init")


@register
class Open(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)
    a: int = Field(default=1, alias="A", exclude=True)


@register
class Names(RootModel[dict[int, tuple[str, ...]]]):
    pass


@register
class Page(BaseModel, Generic[_T]):
    items: list[_T]


@register
@pydantic.dataclasses.dataclass
class Checked:
    x: int
    y: list[int] = Field(default_factory=list)


@register
class Holder(BaseModel):
    page: Page[Review]
    checked: Checked
    pair: Page[Point] | None = None


def test_a_model_comes_back_without_running_user_code() -> None:
    value = Review.model_validate({"stars": 3, "when": "2024-01-01T10:00:00+02:00", "tags": ["b", "a"]})
    value.nested = Review(stars=1, anything=(1, {2: Decimal(1)}))
    value._seen.append(7)
    value.stars = 99  # not validated on assignment, so it must not be validated on loading
    before = canonical(to_tree(value))
    assert value.double == 198
    assert canonical(to_tree(value)) == before
    calls.clear()
    found = again(value)
    assert calls == []
    assert found == value
    assert found.model_fields_set == value.model_fields_set == {"stars", "when", "tags", "nested"}
    assert found._seen == [7]
    assert found._seen is not value._seen
    assert found.nested.anything == (1, {2: Decimal(1)})
    assert type(found.when.tzinfo) is type(value.when.tzinfo) if value.when else False
    assert found.when.utcoffset() == timedelta(hours=2)
    assert found.model_dump() == value.model_dump()
    assert found.model_dump(exclude_unset=True) == value.model_dump(exclude_unset=True)
    assert found.double == 198
    found.stars = 1
    with pytest.raises(AttributeError):
        found._unset  # noqa: B018


def test_extra_values_aliases_and_frozen_models_come_back() -> None:
    value = Open.model_validate({"A": 2, "more": (1,), "$": {1: 2}})
    found = again(value)
    assert found == value
    assert found.__pydantic_extra__ == {"more": (1,), "$": {1: 2}}
    assert again(Open()).__pydantic_extra__ == {}
    with pytest.raises(pydantic.ValidationError):
        found.a = 3


def test_root_generic_and_nested_models_come_back() -> None:
    names = Names({1: ("a", "b")})
    assert again(names) == names
    holder = Holder(
        page=Page[Review](items=[Review(stars=1)]), checked=Checked(x=1), pair=Page[Point](items=[Point(1)])
    )
    found = again(holder)
    assert found == holder
    assert type(found.page) is Page[Review]
    assert type(found.pair) is Page[Point]
    assert type(found.checked) is Checked
    assert type(again(Page(items=[1]))) is Page


def test_a_parametrised_model_names_its_parameter_with_its_module() -> None:
    name = registry.class_name(Page[Review])
    assert name == f"{__name__}:Page[{__name__}:Review]"
    assert registry.class_name(Page[int]) == f"{__name__}:Page[int]"
    assert registry.class_name(Page[list[int] | None]).startswith(f"{__name__}:Page[")


def test_a_model_made_without_validation_comes_back_as_it_is() -> None:
    value = Review.model_construct(stars="not an int")
    found = again(value)
    assert found.stars == "not an int"
    bare = Review.model_construct()
    assert "stars" not in vars(bare)
    assert "stars" not in vars(again(bare))


def test_changed_models() -> None:
    class Review2(Review):
        more: list[int] = Field(default_factory=lambda: [1])
        made: str = Field(default_factory=lambda data: f"{data['stars']} stars")
        _later: int = PrivateAttr(default=5)

    class Review3(Review):
        must: int

    class Review4(BaseModel):
        stars: int

    class Review5(BaseModel):
        stars: int
        when: Any
        tags: Any
        color: Any
        nested: Any
        anything: Any

    tree = to_tree(Review(stars=2))
    found = from_tree(redefined(tree, Review2, "changed:Review2"))
    assert (found.more, found.made, found._later, found._seen) == ([1], "2 stars", 5, [])
    assert found.model_fields_set == {"stars"}
    with pytest.raises(CodecError, match=r"changed:Review3.*gained the field 'must'"):
        from_tree(redefined(tree, Review3, "changed:Review3"))
    with pytest.raises(CodecError, match=r"changed:Review4.*its field 'when'"):
        from_tree(redefined(tree, Review4, "changed:Review4"))
    with pytest.raises(CodecError, match=r"changed:Review5.*its field '_seen'"):
        from_tree(redefined(tree, Review5, "changed:Review5"))


def test_extra_values_that_became_a_field_or_are_not_allowed_any_more() -> None:
    class Open2(Open):
        more: int = 0

    class Open3(BaseModel):
        a: int

    tree = to_tree(Open.model_validate({"more": 1}))
    for cls in (Open2, Open3):
        with pytest.raises(CodecError, match=rf"changed:{cls.__name__}.*'more'"):
            from_tree(redefined(tree, cls, f"changed:{cls.__name__}"))


def test_a_model_with_a_value_of_an_unregistered_class_names_the_path() -> None:
    with pytest.raises(CodecError, match=r"result\.nested\.anything\['k'\]: .*SecretStr"):
        to_tree(Review(stars=1, nested=Review(stars=2, anything={"k": pydantic.SecretStr("x")})), root="result")


def test_set_order_and_field_order_do_not_count_in_canonical_bytes() -> None:
    a = Review(stars=1, tags={"x", "y", "z"})
    b = Review(tags={"z", "y", "x"}, stars=1)
    assert canonical(to_tree(a)) == canonical(to_tree(b))


# --- everything inside everything ---------------------------------------------------------------------------------

leaves = st.one_of(
    st.sampled_from([*Color, *Level, *Word, *Right]),
    st.integers(),
    st.text(max_size=3),
    st.builds(lambda a, b: Frozen(a=a, b=tuple(b)), st.integers(), st.lists(st.integers(), max_size=2)),
)
objects = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(leaves, inner, max_size=2),
        st.builds(Order, st.integers(), st.lists(inner, max_size=2), st.decimals(allow_nan=False)),
        st.builds(Box, inner),
        st.builds(Point, inner, inner),
        st.builds(lambda inside: Review(stars=1, anything=inside), inner),
        st.builds(lambda inside: Open.model_validate({"extra": inside}), inner),
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(objects)
def test_objects_inside_one_another_come_back(value: Any) -> None:
    found = decode(encode(value))
    assert type(found) is type(value)
    assert found == value
    assert canonical(to_tree(found)) == canonical(to_tree(value))


def test_the_rules_are_found_once_per_class() -> None:
    assert codec_classes.slots_of(Frozen) is codec_classes.slots_of(Frozen)
    assert set(codec_classes.slots_of(Frozen)) == {"a", "b", "c"}
