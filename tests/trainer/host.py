"""A Python program with a GPU and without PyTorch, in several habits: see host_main.c."""
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading


def gpu():
    driver = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    assert driver.cuInit(0) == 0
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxSetCurrent(context) == 0

    def work(rounds):
        assert driver.cuCtxSetCurrent(context) == 0
        for number in range(rounds):
            address = ctypes.c_uint64()
            assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(4096 * (number + 1))) == 0
            assert driver.cuMemFree_v2(address) == 0

    return work


def child(number):
    return number * number


def gpu_child(queue):
    gpu()(10)
    queue.put("a child with a GPU")


def descriptors():
    return sorted(int(name) for name in os.listdir("/proc/self/fd") if int(name) < 100)


def plain(work):
    threads = [threading.Thread(target=work, args=(20,)) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    with open("result", "w") as file:
        file.write("done\n")
    print(descriptors(), signal.getsignal(signal.SIGINT), len(os.environ) > 3, flush=True)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(5)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    work(5)
    sys.exit(3)


def fails(work):
    def in_thread():
        work(3)
        raise ValueError("in a thread")

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    raise RuntimeError("at the end")


def forks(work):
    pid = os.fork()
    if pid == 0:
        os._exit(4)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(child, range(8)))
    print(subprocess.run(["sh", "-c", "echo from a shell"], capture_output=True, text=True).stdout, descriptors())
    work(5)


def spawns(work):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=gpu_child, args=(queue,))
    process.start()
    print(queue.get(timeout=60))
    process.join()
    print(process.exitcode)
    work(5)


if __name__ == "__main__":
    work = gpu()
    work(30)
    globals()[sys.argv[1]](work)
