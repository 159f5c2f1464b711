//! Fuzz tests of the frame reader on memory images: valid ones, damaged ones, and noise. The reader must end, must not panic,
//! and must read only whole words at checked pointers within its limits. GPUMEM_FUZZ sets the number of images of each kind
//! (400 by default).

use crate::base::row::AllocationName;
use crate::naming::python::codes::{CodeKind, Codes};
use crate::naming::python::interpreter::{self, PythonFrames};
use crate::naming::python::layout::{self, CurrentInstruction, Layout};
use crate::naming::python::lines::Lines;
use crate::naming::python::memory::{FAR, Memory, Pointer};
use crate::naming::python::modules::{Modules, tests::names};
use crate::naming::python::text::{COLUMNS, SENTENCE, TextBuffer, Types};
use crate::naming::python::walk::{MAX_FRAMES, NameSearch, Reader};
use gpumem_wire::{Phase, Role};
use std::cell::Cell;

const BASE: u64 = 0x5555_0000_0000;
const WORDS: usize = 2048;
const TYPES: Types = Types { code: BASE + 0x100, text: BASE + 0x180, bytes: BASE + 0x200, cell: CELL };
const CELL: u64 = BASE + 0x280;
const MODULE: u64 = BASE + 0x300;

/// Simulated memory. Reads return the image at its addresses; elsewhere they return noise or fail. Each read is checked.
struct Image {
    words: Vec<u64>,
    elsewhere: bool,
    reads: Cell<usize>,
}

impl Image {
    fn at(&self, address: u64) -> Option<u64> {
        assert!(address.is_multiple_of(8), "{address:x} is not aligned");
        assert!((1 << 16..1 << 48).contains(&address), "{address:x} is nowhere");
        self.reads.set(self.reads.get() + 1);
        match self.words.get((address.wrapping_sub(BASE) / 8) as usize) {
            Some(&word) => Some(word),
            None if self.elsewhere => Some(crate::base::row::mix(address, 5)),
            None => None,
        }
    }

    fn put(&mut self, address: u64, word: u64) {
        self.words[((address - BASE) / 8) as usize] = word;
    }

    fn put_int(&mut self, address: u64, int: i32) {
        let place = &mut self.words[((address - BASE) / 8) as usize];
        let mut bytes = place.to_ne_bytes();
        bytes[(address % 8) as usize..][..4].copy_from_slice(&int.to_ne_bytes());
        *place = u64::from_ne_bytes(bytes);
    }

    fn put_bytes(&mut self, address: u64, bytes: &[u8]) {
        for (index, chunk) in bytes.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.put(address + index as u64 * 8, u64::from_ne_bytes(word));
        }
    }
}

impl Memory for Image {
    fn word(&self, at: Pointer, offset: u16) -> Option<u64> {
        assert!(usize::from(offset) < FAR, "{offset} is far");
        self.at(at.address() + u64::from(offset))
    }

    fn bytes(&self, at: Pointer, offset: u16, out: &mut [u8]) -> bool {
        assert!(usize::from(offset) + out.len() <= FAR, "{offset} and {} bytes are far", out.len());
        for (index, byte) in out.iter_mut().enumerate() {
            let address = at.address() + u64::from(offset) + index as u64;
            let Some(word) = self.at(address & !7) else { return false };
            *byte = word.to_ne_bytes()[(address % 8) as usize];
        }
        true
    }
}

struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = crate::base::row::mix(self.0, 0x9e37_79b9_7f4a_7c15);
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// Returns a typical word of memory: pointers into the image, small numbers, noise.
    fn word(&mut self) -> u64 {
        let near = BASE + self.below(WORDS) as u64 * 8;
        match self.below(16) {
            0 => 0,
            1 => self.next(),
            2 => self.next() & 0xff,
            3 => near | self.next() & 7,
            4 => [TYPES.code, TYPES.text, TYPES.bytes, CELL, MODULE][self.below(5)],
            5 => self.next() & ((1 << 47) - 8),
            6 => [u64::MAX, 1 << 47, (1 << 47) - 8, 1 << 16, (1 << 16) - 8][self.below(5)],
            7 => 0x64 | self.next() << 32,
            8 => CODES[self.below(CODES.len())],
            _ => near,
        }
    }
}

const STATE: u64 = BASE + 0x400;
const CODES: [u64; 4] = [BASE + 0xc00, BASE + 0xd00, BASE + 0xe00, BASE + 0xf00];
const OBJECTS: [u64; 3] = [BASE + 0x1000, BASE + 0x1040, BASE + 0x1080];
const FRAMES: u64 = BASE + 0x1400;
const FRAME_BYTES: u64 = 0x200;
const COUNT: usize = 8;

/// Builds a thread with eight frames: `work` (no meaning), `call` on each module from the innermost on, and several `main`.
fn image(layout: &Layout) -> Image {
    let mut image = Image { words: vec![0; WORDS], elsewhere: false, reads: Cell::new(0) };
    let tagged = |word: u64| if layout.mask == u64::MAX { word } else { word | 1 };
    let [work, call, main, _] = CODES;
    for (code, name) in [(work, "work"), (call, "call"), (main, "main")] {
        let (text, file, lines) = (code + 0x2e00, BASE + 0x3800, BASE + 0x3900);
        image.put(code + 8, TYPES.code);
        image.put(code + u64::from(layout.code_file), file);
        image.put(code + u64::from(layout.code_lines), lines);
        image.put_int(code + u64::from(layout.code_first_line), 70);
        image.put(code + u64::from(layout.code_name), text);
        text_object(&mut image, layout, text, TYPES.text, name);
        text_object(&mut image, layout, file, TYPES.text, "file.py");
        image.put(lines + 8, TYPES.bytes);
        image.put(lines + 16, 2);
        // One range of instructions, a line further than the first. For 3.11 and later: without columns, advances the line by
        // 1.
        let table: &[u8] = match layout.lines {
            layout::Lines::Steps | layout::Lines::Ranges => &[0, 1, 100, 0],
            layout::Lines::Locations => &[0x80 | 13 << 3 | 7, 2],
        };
        image.put(lines + 16, table.len() as u64);
        image.put_bytes(lines + 32, table);
    }
    for object in OBJECTS {
        image.put(object + 8, MODULE);
    }
    let frame = |index: usize| FRAMES + index as u64 * FRAME_BYTES;
    for index in 0..COUNT {
        let at = frame(index);
        let (code, local) = match index {
            0 => (work, 0),
            1..=3 => (call, OBJECTS[index - 1]),
            _ => (main, 0),
        };
        image.put(at + u64::from(layout.code), tagged(code));
        image.put(at + u64::from(layout.locals), tagged(local));
        if index + 1 < COUNT {
            image.put(at + u64::from(layout.previous), frame(index + 1));
        }
        match layout.instruction {
            CurrentInstruction::Index(place, unit) => image.put_int(at + u64::from(place), 4 / unit),
            CurrentInstruction::Pointer(place, first) => {
                image.put(at + u64::from(place), code + u64::from(first) + 4)
            }
        }
    }
    let first = match layout.through {
        None => frame(0),
        Some(offset) => {
            image.put(BASE + 0x800 + u64::from(offset), frame(0));
            BASE + 0x800
        }
    };
    image.put(STATE + u64::from(layout.frame), first);
    image
}

fn text_object(image: &mut Image, layout: &Layout, at: u64, kind: u64, text: &str) {
    image.put(at + 8, kind);
    image.put(at + 16, text.len() as u64);
    image.put(at + 32, 0x64);
    image.put_bytes(at + u64::from(layout.text), text.as_bytes());
}

struct Tables {
    codes: Codes,
    modules: Modules,
    names: crate::record::names::Names,
    lines: Lines,
}

/// `call` calls a module and `CODES[3]` is an optimizer. Each module is a child of the next one.
fn tables() -> Tables {
    let tables = Tables { codes: Codes::new(), modules: Modules::new(), names: names(), lines: Lines::new() };
    tables.lines.prepare();
    assert!(
        tables.codes.register(CODES[1], CodeKind::Module, 0, true)
            && tables.codes.register(CODES[3], CodeKind::Optimizer, 0, false)
    );
    for (index, name) in ["inner", "3", "Root"].into_iter().enumerate() {
        let parent = OBJECTS.get(index + 1).copied().unwrap_or(0);
        assert!(tables.modules.register(OBJECTS[index], MODULE, parent, name.as_bytes()));
    }
    tables
}

impl Tables {
    fn find(&self, image: &Image, layout: &Layout) -> Option<AllocationName> {
        let reader = Reader { memory: image, layout, types: &TYPES };
        let known = NameSearch { reader, codes: &self.codes, modules: &self.modules, names: &self.names };
        image.reads.set(0);
        let found = known.reader.innermost(STATE).and_then(|innermost| known.find(STATE, innermost));
        // Two words for each frame. For one with a meaning also the variable, its type, a cell, and the bases of its type.
        assert!(image.reads.get() <= 2 * MAX_FRAMES * (8 + 64), "{} reads", image.reads.get());
        found
    }

    fn line(&self, image: &Image, layout: &Layout) -> String {
        image.reads.set(0);
        let tag = self.lines.tag(&self.names, &Reader { memory: image, layout, types: &TYPES }, STATE);
        // For each frame its code, the code's type, file and first line. Each file's text once, and the text of one line.
        assert!(image.reads.get() <= MAX_FRAMES * 1000 + (1 << 16), "{} reads", image.reads.get());
        String::from_utf8_lossy(self.names.path(tag).unwrap_or_default()).into_owned()
    }

    fn path(&self, found: Option<AllocationName>) -> Option<(String, Phase)> {
        let found = found?;
        let path = self.names.path(found.tag).unwrap_or_default();
        Some((String::from_utf8_lossy(path).into_owned(), found.phase))
    }
}

fn text(image: &Image, layout: &Layout, room: &mut [u8]) -> usize {
    image.reads.set(0);
    let mut out = TextBuffer::new(room);
    Reader { memory: image, layout, types: &TYPES }.write_stack(STATE, SENTENCE, &mut out);
    assert!(image.reads.get() <= MAX_FRAMES * (600 + (1 << 16)), "{} reads", image.reads.get());
    out.position() as usize
}

fn prove(image: &Image, layout: &Layout) -> Result<(), String> {
    let [work, call, main, _] = CODES;
    let codes = [work, call, call, call, main, main, main, main];
    let firsts = [0, OBJECTS[0], OBJECTS[1], OBJECTS[2], 0, 0, 0, 0];
    let said = PythonFrames { codes: &codes, firsts: &firsts, lines: &[71; COUNT] };
    interpreter::check(&Reader { memory: image, layout, types: &TYPES }, STATE, said)
}

#[test]
fn a_thread_is_read_as_it_is_in_every_layout() {
    let tables = tables();
    for layout in Layout::all() {
        let mut image = image(&layout);
        assert_eq!(prove(&image, &layout), Ok(()), "{layout:?}");
        let path = |image: &Image| tables.path(tables.find(image, &layout));
        assert_eq!(path(&image), Some(("Root.3/inner".to_owned(), Phase::Forward)), "{layout:?}");
        let mut room = [0; 4096];
        let used = text(&image, &layout, &mut room);
        let expected = "work (file.py:71)\n".to_owned()
            + &"call (file.py:71)\n".repeat(3)
            + &"main (file.py:71)\n".repeat(4);
        assert_eq!(String::from_utf8_lossy(&room[..used]), expected, "{layout:?}");
        let mut columns = [0; 17];
        let mut out = TextBuffer::new(&mut columns);
        Reader { memory: &image, layout: &layout, types: &TYPES }.write_stack(STATE, COLUMNS, &mut out);
        assert_eq!(out.position(), 16);
        assert_eq!(&columns[..16], b"work\tfile.py\t71\n");
        for most in 0..expected.len() {
            let used = text(&image, &layout, &mut room[..most]);
            let whole = expected[..most].rfind('\n').map_or(0, |end| end + 1);
            assert_eq!(used, whole, "only whole lines");
        }
        // First the variable in a cell, then no variable.
        let local = FRAMES + FRAME_BYTES + u64::from(layout.locals);
        image.put(BASE + 0x10c8, CELL);
        image.put(BASE + 0x10d0, OBJECTS[0]);
        image.put(local, BASE + 0x10c0);
        assert_eq!(path(&image), Some(("Root.3/inner".to_owned(), Phase::Forward)));
        assert!(prove(&image, &layout).is_err());
        image.put(local, 0);
        assert_eq!(path(&image), Some(("Root.3".to_owned(), Phase::Forward)));
        // A chain of frames with a cycle ends.
        let root = FRAMES + 3 * FRAME_BYTES;
        image.put(root + u64::from(layout.previous), FRAMES);
        for index in 0..3 {
            image.put(FRAMES + (index + 1) * FRAME_BYTES + u64::from(layout.locals), 0);
        }
        assert_eq!(path(&image), Some((String::new(), Phase::Forward)));
        assert!(prove(&image, &layout).is_err());
    }
}

#[test]
fn a_frame_says_what_memory_is_for_and_its_callers_whose_it_is() {
    let [work, call, main, _] = CODES;
    let says = |said: &[(u64, CodeKind)]| {
        let tables = tables();
        assert!(said.iter().all(|&(code, what)| tables.codes.register(code, what, 0, false)));
        let mut found = Layout::all().into_iter().map(|layout| tables.find(&image(&layout), &layout));
        let first = found.next().expect("a layout");
        assert!(found.all(|found| found == first), "{said:?}");
        first.and_then(|here| Some((tables.path(first)?.0, here.phase, here.role)))
    };
    let inner = "Root.3/inner".to_owned();
    assert_eq!(says(&[]), Some((inner.clone(), Phase::Forward, Role::Unknown)));
    let pairs = [
        (CodeKind::Parameter, Role::Parameter),
        (CodeKind::Gradient, Role::Gradient),
        (CodeKind::OptimizerState, Role::OptimizerState),
    ];
    for (what, role) in pairs {
        assert_eq!(says(&[(work, what)]), Some((inner.clone(), Phase::Forward, role)));
        // A function with a role that calls the module, and is not called by it, gives no role.
        assert_eq!(says(&[(main, what)]), Some((inner.clone(), Phase::Forward, Role::Unknown)));
        let backward = [(work, what), (call, CodeKind::Nothing), (main, CodeKind::Backward)];
        assert_eq!(says(&backward), Some((String::new(), Phase::Backward, role)));
        let alone = [(work, what), (call, CodeKind::Nothing)];
        assert_eq!(says(&alone), Some((String::new(), Phase::Unknown, role)));
        assert_eq!(
            says(&[(work, what), (call, CodeKind::Boundary)]),
            Some((String::new(), Phase::Unknown, role))
        );
    }
    // Through a function without a meaning.
    let called = |what| says(&[(call, CodeKind::Nothing), (main, what)]);
    assert_eq!(called(CodeKind::Parameter), Some((String::new(), Phase::Unknown, Role::Parameter)));
    assert_eq!(called(CodeKind::Gradient), None);
    assert_eq!(called(CodeKind::OptimizerState), Some((String::new(), Phase::Unknown, Role::OptimizerState)));
}

#[test]
fn a_backward_hook_has_the_name_of_its_module() {
    let [work, call, main, _] = CODES;
    for layout in Layout::all() {
        let tables = tables();
        let register = |code, kind| assert!(tables.codes.register(code, kind, 0, false));
        // `work` is the hook, `call` calls it.
        register(call, CodeKind::ModuleHook);
        register(main, CodeKind::Nothing);
        let mut image = image(&layout);
        let argument = |number: u64| FRAMES + u64::from(layout.locals) + 8 * number;
        (1..4).for_each(|frame| image.put(argument(0) + frame * FRAME_BYTES, 0));
        let of_hook = |image: &Image| tables.path(tables.find(image, &layout));
        assert_eq!(of_hook(&image), Some((String::new(), Phase::Backward)));
        for number in [1, 0] {
            image.put(argument(number), OBJECTS[1]);
            assert_eq!(of_hook(&image), Some(("Root.3".to_owned(), Phase::Backward)), "{number} {layout:?}");
        }
        if let Some((owner, first)) = layout.owner {
            // The hook is called by C code.
            let between = FRAMES + COUNT as u64 * FRAME_BYTES;
            let owner = between + u64::from(owner);
            image.put(owner & !7, u64::from(first) << (8 * (owner % 8)));
            image.put(between + u64::from(layout.previous), FRAMES + FRAME_BYTES);
            image.put(FRAMES + u64::from(layout.previous), between);
            assert_eq!(of_hook(&image), Some(("Root.3".to_owned(), Phase::Backward)), "{layout:?}");
            image.put(FRAMES + u64::from(layout.previous), FRAMES + FRAME_BYTES);
        }
        // PyTorch's function itself has no module.
        register(work, CodeKind::ModuleHook);
        register(call, CodeKind::Nothing);
        assert_eq!(of_hook(&image), Some((String::new(), Phase::Backward)));
    }
}

#[test]
fn line_is_that_of_the_innermost_frame_of_the_program() {
    for layout in Layout::all() {
        let tables = tables();
        let mut image = image(&layout);
        assert_eq!(tables.line(&image, &layout), "file.py:71 work", "{layout:?}");
        // A line that is not cached takes more than twice as many reads.
        assert_eq!(tables.line(&image, &layout), "file.py:71 work");
        assert!(image.reads.get() <= 16, "it is remembered: {}", image.reads.get());
        // Another code object, of the standard library, at the same address.
        let [work, call, main, _] = CODES;
        let library = BASE + 0x3e00;
        text_object(&mut image, &layout, library, TYPES.text, "/usr/lib/python3.11/copy.py");
        image.put(work + u64::from(layout.code_file), library);
        assert_eq!(tables.line(&image, &layout), "file.py:71 call", "{layout:?}");
        image.put_int(call + u64::from(layout.code_first_line), 80);
        assert_eq!(tables.line(&image, &layout), "file.py:81 call", "{layout:?}");
        // Only library frames: the innermost line counts.
        image.put(call + u64::from(layout.code_file), library);
        image.put(main + u64::from(layout.code_file), library);
        assert_eq!(tables.line(&image, &layout), "copy.py:71 work", "{layout:?}");
        image.put(STATE + u64::from(layout.frame), 0);
        assert_eq!(tables.line(&image, &layout), "", "without frames");
    }
}

#[test]
fn no_layout_passes_for_another() {
    for right in Layout::all() {
        let image = image(&right);
        for wrong in Layout::all() {
            // The layouts of 3.14 and 3.15 differ only in where the interpreter publishes them.
            let same = Layout { version: right.version, mask: right.mask, ..wrong } == right;
            assert_eq!(prove(&image, &wrong).is_ok(), same, "{:?} as {:?}", right.version, wrong.version);
        }
    }
}

fn images() -> usize {
    std::env::var("GPUMEM_FUZZ").ok().and_then(|count| count.parse().ok()).unwrap_or(400)
}

/// Runs every reader on this image.
fn read_all(tables: &Tables, image: &Image, layout: &Layout, room: &mut [u8]) {
    tables.find(image, layout);
    tables.line(image, layout);
    text(image, layout, room);
    let _ = prove(image, layout);
}

#[test]
fn damaged_threads_and_noise_are_survived() {
    let tables = tables();
    let mut dice = Dice(1);
    let mut room = [0; 2048];
    for layout in Layout::all() {
        let whole = image(&layout);
        let mut alike = 0;
        for turn in 0..images() {
            // Damaged: some words are replaced or have a flipped bit.
            let mut damaged =
                Image { words: whole.words.clone(), elsewhere: turn % 2 == 0, reads: Cell::new(0) };
            for _ in 0..=dice.below(6) {
                let used = damaged.words.iter().enumerate().filter(|(_, word)| **word != 0);
                let places: Vec<usize> = used.map(|(place, _)| place).collect();
                let place = places[dice.below(places.len())];
                damaged.words[place] = match dice.below(3) {
                    0 => damaged.words[place] ^ 1 << dice.below(64),
                    1 => damaged.words[place].wrapping_add(dice.next() & 0xff),
                    _ => dice.word(),
                };
            }
            alike += usize::from(prove(&damaged, &layout).is_ok());
            read_all(&tables, &damaged, &layout, &mut room);
            // Noise, except for the start and some words that are valid.
            let words = (0..WORDS).map(|_| dice.word()).collect();
            let mut noise = Image { words, elsewhere: turn % 2 == 0, reads: Cell::new(0) };
            for place in 0..WORDS {
                if whole.words[place] != 0 && dice.below(4) != 0 {
                    noise.words[place] = whole.words[place];
                }
            }
            read_all(&tables, &noise, &layout, &mut room);
        }
        assert!(alike < images() / 2, "damage goes unnoticed: {alike}");
    }
}
