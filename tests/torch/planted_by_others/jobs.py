# Hyper-parameter search: helper processes import our package, which touches the GPU, and then only parse logs.
import multiprocessing as mp
import time
import torch


def parse(queue):
    import torch
    torch.zeros(1, device="cuda")
    while queue.get() is not None:
        time.sleep(0.01)


def main():
    ctx = mp.get_context("spawn")
    queue = ctx.Queue()
    helpers = [ctx.Process(target=parse, args=(queue,)) for _ in range(6)]
    for h in helpers:
        h.start()
    net = torch.nn.Linear(2048, 2048).cuda()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for i in range(250):
        net(torch.empty(512, 2048, device="cuda")).square().mean().backward()
        opt.step()
        opt.zero_grad()
        queue.put(i)
        time.sleep(0.04)
    for _ in helpers:
        queue.put(None)
    for h in helpers:
        h.join()


if __name__ == "__main__":
    main()
