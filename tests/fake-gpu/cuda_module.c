/* Modules: an ELF image costs the bytes of its loaded sections, and any other image a fixed size. PTX costs its globals
 * in addition. */
#include "cuda_internal.h"

#include <elf.h>
#include <stdlib.h>
#include <string.h>

typedef struct module {
    struct module *next, *library_module;
    context *owner;
    uint64_t need;  /* loaded sections */
    uint64_t taken; /* what it has taken so far: with lazy loading the rest comes with its first launch */
    uint64_t due;   /* that rest */
    uint64_t local; /* local memory that a thread of its kernels needs */
    size_t image_bytes;
    void *image;
    uint32_t id;
} module;
static module *modules;
static uint32_t module_ids;

/* Data of the callback MODULE_LOADED. */
typedef struct {
    uint32_t module_id;
    size_t cubin_size;
    const void *cubin;
} module_data;

static uint64_t elf_need(const void *image, size_t *image_bytes) {
    const Elf64_Ehdr *header = image;
    const Elf64_Shdr *section = (const void *)((const char *)image + header->e_shoff);
    uint64_t need = 0, end = header->e_shoff + (uint64_t)header->e_shnum * sizeof *section;
    for (int i = 0; i < header->e_shnum; i++) {
        if (section[i].sh_flags & SHF_ALLOC) need += section[i].sh_size;
        uint64_t last = section[i].sh_type == SHT_NOBITS ? 0 : section[i].sh_offset + section[i].sh_size;
        if (last > end) end = last;
    }
    *image_bytes = end;
    return need;
}

/* Returns the sum of the numbers in brackets in declarations that begin with the word. */
static uint64_t ptx_bytes(const char *text, const char *word) {
    uint64_t sum = 0;
    for (const char *at = text; (at = strstr(at, word)); at++) {
        const char *bracket = at + strcspn(at, "[;\n");
        if (*bracket == '[') sum += strtoull(bracket + 1, NULL, 10);
    }
    return sum;
}

/* Stands for a compiler's output: an ELF with one loaded section without contents. */
static void *make_image(uint64_t need, size_t *image_bytes) {
    struct {
        Elf64_Ehdr header;
        Elf64_Shdr section[2];
    } *image = calloc(1, sizeof *image);
    if (!image) abort();
    memcpy(image->header.e_ident, ELFMAG, SELFMAG);
    image->header.e_ident[EI_CLASS] = ELFCLASS64;
    image->header.e_ident[EI_DATA] = ELFDATA2LSB;
    image->header.e_ident[EI_VERSION] = EV_CURRENT;
    image->header.e_type = ET_EXEC;
    image->header.e_machine = 190; /* EM_CUDA */
    image->header.e_version = EV_CURRENT;
    image->header.e_ehsize = sizeof(Elf64_Ehdr);
    image->header.e_shentsize = sizeof(Elf64_Shdr);
    image->header.e_shoff = sizeof(Elf64_Ehdr);
    image->header.e_shnum = 2;
    image->section[1].sh_type = SHT_NOBITS;
    image->section[1].sh_flags = SHF_ALLOC;
    image->section[1].sh_size = need;
    *image_bytes = sizeof *image;
    return image;
}

/* The context's modules together take whole granules. */
static CUresult recharge(context *c, int64_t change) {
    uint64_t charged = sim_round(c->module_need + (uint64_t)change, machine->cost.module_granule);
    if (charged > c->module_charged) {
        if (sim_charge(machine, slot, c->device, charged - c->module_charged)) return OUT_OF_MEMORY;
    } else {
        sim_discharge(machine, slot, c->device, c->module_charged - charged);
    }
    usage(c->device)->module_bytes += charged - c->module_charged;
    c->module_need += (uint64_t)change;
    c->module_charged = charged;
    return OK;
}

static CUresult load(module **out, const void *image) {
    context *c = current();
    if (!c) return INVALID_CONTEXT;
    if (!out) return INVALID_VALUE;
    module *m = calloc(1, sizeof *m);
    if (!m) abort();
    m->owner = c;
    const void *cubin = image;
    if (image && !memcmp(image, ELFMAG, SELFMAG)) {
        m->need = elf_need(image, &m->image_bytes);
    } else {
        m->need = machine->cuda_module_bytes;
        if (image && !strncmp(image, ".version", 8)) {
            m->need += ptx_bytes(image, ".global .align");
            m->local = ptx_bytes(image, ".local .align");
        }
        cubin = m->image = make_image(m->need, &m->image_bytes);
    }
    const char *loading = getenv("CUDA_MODULE_LOADING");
    int lazy = machine->cuda_lazy && !(loading && !strcmp(loading, "EAGER"));
    m->taken = (lazy ? m->need / 2 : m->need) + machine->cost.module_overhead;
    m->due = lazy ? m->need - m->need / 2 : 0;
    enter();
    CUresult result = recharge(c, (int64_t)m->taken);
    if (result == OK) {
        m->id = ++module_ids;
        m->next = modules;
        modules = m;
    }
    leave();
    if (result != OK) {
        free(m->image);
        free(m);
        return result;
    }
    module_data data = {m->id, m->image_bytes, cubin};
    tell_resource(MODULE_LOADED, c, NULL, &data);
    *out = m;
    return OK;
}

static CUresult unload(module *m) {
    if (!m) return INVALID_HANDLE;
    module_data data = {m->id, m->image_bytes, m->image};
    tell_resource(MODULE_UNLOAD, m->owner, NULL, &data);
    enter();
    module **at = &modules;
    while (*at && *at != m) at = &(*at)->next;
    int found = *at == m;
    if (found) {
        *at = m->next;
        if (!m->owner->dead) recharge(m->owner, -(int64_t)m->taken);
    }
    leave();
    if (!found) return INVALID_HANDLE;
    free(m->image);
    free(m);
    return OK;
}

typedef struct {
    module **module;
    const void *image;
} load_params;
EXPORT CUresult cuModuleLoadData(module **mod, const void *image) {
    load_params params = {mod, image};
    CALL(19, &params, load(mod, image));
}
EXPORT CUresult cuModuleLoadFatBinary(module **mod, const void *image) {
    load_params params = {mod, image};
    CALL(21, &params, load(mod, image));
}
EXPORT CUresult cuModuleLoad(module **mod, const char *path) {
    load_params params = {mod, path};
    CALL(18, &params, load(mod, NULL));
}
EXPORT CUresult cuModuleLoadDataEx(module **mod, const void *image, unsigned count, int *options, void **values) {
    struct {
        module **mod;
        const void *image;
        unsigned count;
        int *options;
        void **values;
    } params = {mod, image, count, options, values};
    CALL(20, &params, load(mod, image));
}
EXPORT CUresult cuModuleUnload(module *mod) {
    struct {
        module *mod;
    } params = {mod};
    CALL(22, &params, unload(mod));
}

typedef struct {
    module **library;
    const void *code;
    int *jit;
    void **jit_values;
    unsigned jit_count;
    int *options;
    void **values;
    unsigned count;
} library_params;
EXPORT CUresult cuLibraryLoadData(module **library, const void *code, int *jit, void **jit_values, unsigned jit_count,
                                  int *options, void **values, unsigned count) {
    library_params params = {library, code, jit, jit_values, jit_count, options, values, count};
    CALL(678, &params, load(library, code));
}
EXPORT CUresult cuLibraryLoadFromFile(module **library, const char *path, int *jit, void **jit_values,
                                      unsigned jit_count, int *options, void **values, unsigned count) {
    library_params params = {library, path, jit, jit_values, jit_count, options, values, count};
    CALL(679, &params, load(library, NULL));
}
EXPORT CUresult cuLibraryUnload(module *library) {
    struct {
        module *library;
    } params = {library};
    CALL(680, &params, unload(library));
}
EXPORT CUresult cuLibraryGetModule(module **mod, module *library) {
    SILENT(library ? (*mod = library, OK) : INVALID_HANDLE);
}
EXPORT CUresult cuModuleGetFunction(void **function, module *mod, const char *name) {
    SILENT(mod && name ? (*function = mod, OK) : INVALID_HANDLE);
}
EXPORT CUresult cuModuleGetLoadingMode(int *mode) { SILENT((*mode = 2, OK)); }

/* Kernels compute nothing, but a launch allocates its memory: stacks, and the rest of a lazily loaded module. A
 * function is represented by its module. */
static CUresult launch(const void *function) {
    context *c = current();
    if (!c) return INVALID_CONTEXT;
    CUresult result = OK;
    enter();
    module *m = modules;
    while (m && m != function) m = m->next;
    if (m && m->due && !m->owner->dead && (result = recharge(m->owner, (int64_t)m->due)) == OK) {
        m->taken += m->due;
        m->due = 0;
    }
    if (m && result == OK && m->local > c->stack_limit) result = stack_grow(c, m->local);
    leave();
    return result;
}
EXPORT CUresult cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                               unsigned shared, void *stream, void **parameters, void **extra) {
    (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)parameters, (void)extra;
    SILENT(launch(f));
}
