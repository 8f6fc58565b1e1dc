"""``dalsegno demo``: one agent, killed in the middle of its work, with this library and without it.

What to read, in this order:

* `agent`: the agent, as one writes it with this library; `plain`: the same logic as an ordinary script.
* `world`: what is outside of both: the model, the mail, and the files in which every real execution leaves a line.
* `child`: the process that is killed; `lives`: who kills it and starts it again.
* `measure`: what the files say afterwards; `show`: what is printed.
"""
