"""Starting training processes: the `deepspeed` command and what it stands on. Processes started by
`torchrun` or by hand need nothing from here.

    command, runner                the command line, from flags to supervised processes
    resources                      which slots of which hosts, and of this machine
    nodes, multinode_runner        several nodes, and the programs that reach them
    launch, plan                   one launcher's processes, and what it starts
    worker_exec, launch_rank       the first moments of a process
    agent                          torch's agent, which starts processes and sees their ends
    logs, failures                 what processes print, and which failure is reported
    signals, process_tree          ending processes, with all that they started
    job                            the launchers of one job among each other
    constants                      names and numbers of all of them
"""
