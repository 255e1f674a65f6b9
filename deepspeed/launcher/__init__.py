"""Starting training processes: the `deepspeed` command and what it stands on.

Owns: choosing devices (`resources`), the command line (`runner`), running one node's processes
(`launch`), and their logs (`logs`). Does not own: joining the processes into a group, which is
`deepspeed.comm`'s. Processes that were started by `torchrun` or by hand need nothing from here.
"""
