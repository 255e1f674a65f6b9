"""What sees operations, and waits that do not end.

observation                     who wants to hear of each operation
operation_log, logging_control  statistics of operations, and their switch
intent                          ranks compare what they are about to do
lone_waits                      waits for ranks that do not come, reported while they last
lookout                         the thread that looks while a program waits
backend_threads                 gloo's threads: how they are scheduled, whether they rest
"""
