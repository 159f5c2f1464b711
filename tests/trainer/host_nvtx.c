/* A program that annotates itself with NVTX: its calls are those of agent-lib/tests/nvtx/client.c. See host_main.c. */
#include <stdint.h>
#include <wchar.h>

#include "host.h"

int nvtxRangePushA(const char *text);
int nvtxRangePop(void);
void nvtxMarkA(const char *text);
uint64_t nvtxRangeStartA(const char *text);
void nvtxRangeEnd(uint64_t id);
void *nvtxDomainCreateA(const char *name);
void *nvtxDomainCreateW(const wchar_t *name);
void *nvtxDomainRegisterStringA(void *domain, const char *text);
int nvtxDomainRangePop(void *domain);
int push_event(void *domain, uint16_t size, int32_t type, const void *message);

int main(void) {
    open_gpu();
    for (int i = 0; i < 12; i++) {
        void *domain = i % 2 ? nvtxDomainCreateW(L"wide") : nvtxDomainCreateA("ours");
        void *text = nvtxDomainRegisterStringA(domain, "registered");
        uint64_t range = nvtxRangeStartA("range");
        nvtxRangePushA("step");
        push_event(domain, 48, 3, text);
        work(10);
        nvtxMarkA("worked");
        nvtxDomainRangePop(domain);
        nvtxRangePop();
        nvtxRangeEnd(range);
        nap(25);
    }
    view();
    return 0;
}
