"""Seeing what waits in a store, and deciding about it, from outside: what `Operator` and the commands are made of."""
