"""Where the ``dalsegno`` command begins, and ``python -m dalsegno``, which is the same.

Nothing is imported before Ctrl-C is seen to but what that needs.
"""

from dalsegno.inspect.interrupts import end_on_interrupt


def main() -> None:
    end_on_interrupt()
    from dalsegno.inspect.cli import main as command

    command()


if __name__ == "__main__":
    main()
