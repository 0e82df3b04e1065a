"""One source and one ledger, rollouts on several nodes: the parts of it that are the same for every cluster.

Read in this order: ``_lease`` (what travels), ``_leases`` (how the service lends groups to nodes), ``_service`` (the service: an
engine whose generate function lends), ``_node`` (a node: an engine whose source is what it was lent). ``trio_rollout_compat.ray``
makes actors of them.
"""
