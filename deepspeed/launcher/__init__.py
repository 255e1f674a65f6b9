"""Starting training processes: the `deepspeed` command and what it stands on.

Does not own: joining the processes into a group, which is `deepspeed.comm`'s. Processes that were
started by `torchrun` or by hand need nothing from here.

The command, on the machine where the user gave it:

    command, runner          the command line, from flags to supervised processes
    resources, devices       which slots of which hosts, and of this machine
    elastic                  how many nodes may take part
    nodes, multinode_runner  several nodes, and the programs that reach them
    environment              which variables go along

On each node:

    launch, plan                   one launcher's processes, and what it starts
    worker_exec, launch_rank       the first moments of a process
    logs                           what processes print
    signals, process_tree, reaper  ending them, with all that they started
    agent                          torch's agent, which starts them and sees their ends
    restarts, rendezvous           elastic: when it gives up, and where nodes meet

Between nodes:

    coordinator, coordinator_client  the end of one launcher is the end of all
    failures                         which failure is reported, and how it reads
    constants                        names and numbers of all of them
"""
