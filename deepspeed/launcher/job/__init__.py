"""The launchers of one job among each other, on several nodes.

`coordinator`, `client`: the end of one launcher is the end of all, and its cause is known.
`rendezvous`: where the nodes of an elastic job meet, and when one of them gives up.
"""
