"""Shared parts of the benchmarks: a fake server in a separate process, arms in client processes, rounds, reports.

Read in this order: ``fake`` (the server, ``server.c``), ``jobs`` (what an arm does, written once for Trio and asyncio),
``arms`` (who does it), ``rounds`` (arms interleaved, one process each), ``report`` (header, JSON, table, plot).
"""
