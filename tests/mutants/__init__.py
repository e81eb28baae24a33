"""Mutation tests: change one expression of a module at a time, and see whether a test fails.

    python -m tests.mutants cutslots/training/losses.py --jobs 2

The mutations are mutmut's. Its own runner skips decorated functions and keeps all mutants in one module, which custom
operators and autograd functions do not survive. Here each mutant is a forked process that has imported torch but not
cutslots. It compiles the mutated source in memory and runs tests of the package. No file is changed.

A first pass without mutations times each test and records the lines that it runs. A mutant is given the tests that run
its statement, the fastest first.

mutate.py makes the mutants, measure.py is the first pass, processes.py runs them, __main__.py is the command.
"""
