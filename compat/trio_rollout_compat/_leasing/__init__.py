"""A cluster as an engine that lends its samples: one source and one ledger, rollouts on several nodes, without a word of Ray.

Read in this order: ``_leases`` (how the service lends samples to nodes, and what travels between them), ``_service`` (the service:
an engine whose generate function lends), ``_node`` (a node: an engine whose source is the samples that it was lent).
``trio_rollout_compat.ray`` makes actors of them. Decision: docs/decisions/0017-a-cluster-is-an-engine-that-lends.md.
"""
