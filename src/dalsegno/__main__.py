"""``python -m dalsegno`` is the ``dalsegno`` command."""

from dalsegno.inspect.cli import main

if __name__ == "__main__":
    main()
