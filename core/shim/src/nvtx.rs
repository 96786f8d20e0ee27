//! NVTX ranges that mark units of work: `tally:request`, `tally:token`, `tally:prefill`.
//!
//! NVTX is a set of headers. At a program's first call they load the library that `NVTX_INJECTION64_PATH` names and
//! call its `InitializeInjectionNvtx2`, which puts functions of its own into their tables. This is that library: it
//! takes the functions of ranges, domains and registered strings, and leaves all others as they are. Each library of a
//! program that was compiled with the headers has tables of its own and calls in turn.
//!
//! The preloaded library must not export that function: headers that look for it in the whole program would then pass
//! over a profiler that the variable names.
//!
//! Numbers and layouts are those of NVTX 3 (`nvtxTypes.h`, `nvToolsExt.h`); they are part of its binary interface.
//! Names in UTF-16 or UTF-32 are not read: such ranges are never units, and only count for nesting.

use crate::{log, marks};
use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};
use tally_ipc::marks::{Kind, What};
use tally_ipc::wire::ENV_PRIORITY;

/// Export table that gives the tables of functions.
const CALLBACKS: u32 = 1;
/// Tables of functions: the first interface, and domains.
const MODULE_CORE: c_int = 1;
const MODULE_CORE2: c_int = 5;
/// What a push or a pop returns if nobody keeps count.
const NOT_TRACKED: c_int = -2;
/// Kinds of messages: bytes, and a handle of a registered string.
const MESSAGE_ASCII: i32 = 1;
const MESSAGE_REGISTERED: i32 = 3;

/// Kinds of payloads that are integers.
const PAYLOAD_U64: i32 = 1;
const PAYLOAD_I64: i32 = 2;
const PAYLOAD_U32: i32 = 4;
const PAYLOAD_I32: i32 = 5;

/// Units of a thread that lie in one another. Further ones are dropped and counted.
const NESTED_MAX: usize = 16;
/// Longest text of a mark that is read.
const TEXT_BYTES_MAX: usize = 256;
/// High bits of a handle of a registered string that marks a unit; the rest is [`What`].
const HANDLE: u64 = 0x7a11 << 48;
/// Longest age that such a handle can carry, us: 71 minutes.
const HANDLE_AGE_US_MAX: u64 = u32::MAX as u64;

type GetExportTable = unsafe extern "C" fn(u32) -> *const c_void;
/// A function of unknown type.
type Function = *const ();

#[repr(C)]
struct Callbacks {
    bytes: usize,
    module: Option<unsafe extern "C" fn(c_int, *mut *const *mut Function, *mut u32) -> c_int>,
}

/// `nvtxEventAttributes_t`, of versions 1 to 3.
#[repr(C)]
struct Attributes {
    version: u16,
    bytes: u16,
    _category: u32,
    _colour: [u32; 2],
    payload_kind: i32,
    _reserved: i32,
    payload: u64,
    message_kind: i32,
    message: u64,
}

const _: () = assert!(size_of::<Attributes>() == 48);

impl Attributes {
    /// The payload, if it is an integer that is not negative: an age, us. A text is better registered once than with
    /// each number.
    fn number(&self) -> Option<u64> {
        match self.payload_kind {
            PAYLOAD_U64 => Some(self.payload),
            PAYLOAD_I64 => self.payload.cast_signed().try_into().ok(),
            PAYLOAD_U32 => Some(self.payload & u64::from(u32::MAX)),
            PAYLOAD_I32 => (self.payload as u32).cast_signed().try_into().ok(),
            _ => None,
        }
    }
}

/// NVTX calls it once for each library of the program that has its tables.
///
/// # Safety
/// `get` is null or gives export tables of NVTX, which stay where they are.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub unsafe extern "C" fn InitializeInjectionNvtx2(get: Option<GetExportTable>) -> c_int {
    // Nobody reads the marks of other programs. NVTX then makes all its functions empty.
    let is_high = std::env::var_os(ENV_PRIORITY).is_some_and(|class| class == "high");
    let Some(get) = get.filter(|_| is_high) else { return 0 };
    // SAFETY: by the caller.
    c_int::from(unsafe { install(get) })
}

/// Library that the headers load.
const INJECTION: &str = "NVTX_INJECTION64_PATH";

/// Says in the log if the program's marks go to another library, such as a profiler's.
pub fn note_other() {
    let named = std::env::var_os(INJECTION).filter(|path| !path.is_empty());
    if let Some(other) =
        named.filter(|path| !path.as_encoded_bytes().ends_with(b"libtally_shim.so"))
    {
        log!("{INJECTION} names {}: marks of this program are not counted", other.display());
    }
}

/// Puts our functions into the tables. Whether there were any.
unsafe fn install(get: GetExportTable) -> bool {
    // SAFETY: by the caller; a table says how long it is.
    let callbacks = unsafe { get(CALLBACKS).cast::<Callbacks>().as_ref() };
    let Some(Callbacks { bytes, module: Some(module) }) = callbacks else { return false };
    if *bytes < size_of::<Callbacks>() {
        return false;
    }
    let mut any = false;
    for (number, functions) in [(MODULE_CORE, CORE.0), (MODULE_CORE2, CORE2.0)] {
        let (mut table, mut count) = (std::ptr::null(), 0);
        // SAFETY: valid out-pointers.
        if unsafe { module(number, &mut table, &mut count) } == 0 || table.is_null() {
            continue;
        }
        for &(id, function) in functions.iter().filter(|(id, _)| *id < count) {
            // SAFETY: so many entries, each null or the place of a function's pointer.
            if let Some(place) = unsafe { (*table.add(id as usize)).as_mut() } {
                *place = function;
                any = true;
            }
        }
    }
    any
}

/// Functions with their numbers in a table.
struct Functions(&'static [(u32, Function)]);

// SAFETY: addresses of functions.
unsafe impl Sync for Functions {}

static CORE: Functions = Functions(&[
    (4, start_ex as Function),
    (5, start_a as Function),
    (7, end as Function),
    (8, push_ex as Function),
    (9, push_a as Function),
    (10, push_w as Function),
    (11, pop as Function),
]);

static CORE2: Functions = Functions(&[
    (2, domain_start_ex as Function),
    (3, domain_end as Function),
    (4, domain_push_ex as Function),
    (5, domain_pop as Function),
    (10, register_string as Function),
    (12, create_domain as Function),
]);

/// What a text marks; `None` for any other text, after its first bytes.
///
/// # Safety
/// `text` is null or NUL-terminated.
#[inline]
unsafe fn marked(text: *const c_char) -> Option<What> {
    const PREFIX: &[u8] = b"tally:";
    if text.is_null() {
        return None;
    }
    let text: *const u8 = text.cast();
    for (i, expected) in PREFIX.iter().enumerate() {
        // SAFETY: each byte is read only if the one before is not the NUL.
        if unsafe { *text.add(i) } != *expected {
            return None;
        }
    }
    // SAFETY: as above.
    parse(unsafe { rest(text.add(PREFIX.len())) })
}

/// The bytes before the NUL, and at most [`TEXT_BYTES_MAX`].
unsafe fn rest<'a>(text: *const u8) -> &'a [u8] {
    // SAFETY: by the caller, as in `marked`.
    let bytes = (0..TEXT_BYTES_MAX).find(|i| unsafe { *text.add(*i) } == 0);
    // SAFETY: these were read.
    unsafe { std::slice::from_raw_parts(text, bytes.unwrap_or(TEXT_BYTES_MAX)) }
}

/// `KIND [age_us=N] ...`; further words are left alone.
fn parse(text: &[u8]) -> Option<What> {
    let mut words = text.split(|byte| *byte == b' ');
    let kind = match words.next()? {
        b"request" => Kind::Request,
        b"token" => Kind::Token,
        b"prefill" => Kind::Prefill,
        _ => return None,
    };
    let age = words.find_map(|word| word.strip_prefix(b"age_us="));
    let age_us = age.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
    Some(What::marked(kind, age_us))
}

/// What an event's attributes mark.
///
/// # Safety
/// As NVTX asks for: null, or attributes that say how long they are.
unsafe fn marked_by(attributes: *const Attributes) -> Option<What> {
    // SAFETY: by the caller; the first two numbers are in all versions.
    unsafe {
        if attributes.is_null()
            || usize::from((&raw const (*attributes).bytes).read()) < size_of::<Attributes>()
        {
            return None;
        }
        let attributes = &*attributes;
        let what = match attributes.message_kind {
            MESSAGE_ASCII => marked(attributes.message as *const c_char),
            MESSAGE_REGISTERED => registered(attributes.message),
            _ => None,
        }?;
        Some(What { age_us: what.age_us.or_else(|| attributes.number()), ..what })
    }
}

/// A handle that says by itself what it marks: nothing is kept.
fn handle_of(what: What) -> u64 {
    let age_us = what.age_us.map(|us| us.min(HANDLE_AGE_US_MAX));
    HANDLE | What { age_us, ..what }.pack()
}

fn registered(handle: u64) -> Option<What> {
    (handle & HANDLE_MASK == HANDLE).then(|| What::unpack(handle & !HANDLE_MASK))?
}

const HANDLE_MASK: u64 = 0xffff << 48;

/// A unit that a thread has pushed and not popped.
#[derive(Clone, Copy)]
struct Pushed {
    domain: usize,
    /// Ranges of its domain above it that are no units.
    above: u32,
    identity: u64,
}

/// Units that a thread has pushed, over all domains. Ranges of a domain nest; those of different ones need not.
struct Stack {
    count: Cell<usize>,
    pushed: [Cell<Pushed>; NESTED_MAX],
}

thread_local! {
    static STACK: Stack = const {
        Stack {
            count: Cell::new(0),
            pushed: [const { Cell::new(Pushed { domain: 0, above: 0, identity: 0 }) }; NESTED_MAX],
        }
    };
}

impl Stack {
    /// The uppermost unit of a domain.
    fn top(&self, domain: usize) -> Option<usize> {
        let pushed = self.pushed.get(..self.count.get())?;
        pushed.iter().rposition(|pushed| pushed.get().domain == domain)
    }

    fn push(&self, domain: usize, what: Option<What>) {
        let count = self.count.get();
        if let Some(what) = what {
            match self.pushed.get(count) {
                None => marks::lose(),
                Some(place) => {
                    if let Some(identity) = marks::begin(what) {
                        place.set(Pushed { domain, above: 0, identity: identity.get() });
                        return self.count.set(count + 1);
                    }
                }
            }
        }
        if count > 0
            && let Some(at) = self.top(domain)
        {
            let pushed = self.pushed[at].get();
            self.pushed[at].set(Pushed { above: pushed.above.saturating_add(1), ..pushed });
        }
    }

    fn pop(&self, domain: usize) {
        let count = self.count.get();
        if count == 0 {
            return;
        }
        let Some(at) = self.top(domain) else { return };
        let pushed = self.pushed[at].get();
        if pushed.above > 0 {
            return self.pushed[at].set(Pushed { above: pushed.above - 1, ..pushed });
        }
        for (to, from) in (at..).zip(at + 1..count) {
            self.pushed[to].set(self.pushed[from].get());
        }
        self.count.set(count - 1);
        marks::end(pushed.identity);
    }
}

fn push(domain: usize, what: Option<What>) -> c_int {
    STACK.with(|stack| stack.push(domain, what));
    NOT_TRACKED
}

fn start(what: Option<What>) -> u64 {
    // 0 is what a range has that nobody follows.
    what.and_then(marks::begin).map_or(0, std::num::NonZeroU64::get)
}

unsafe extern "C" fn push_a(text: *const c_char) -> c_int {
    // SAFETY: as NVTX asks for.
    push(0, unsafe { marked(text) })
}

unsafe extern "C" fn push_w(_: *const c_void) -> c_int {
    push(0, None)
}

unsafe extern "C" fn push_ex(attributes: *const Attributes) -> c_int {
    // SAFETY: as NVTX asks for.
    push(0, unsafe { marked_by(attributes) })
}

unsafe extern "C" fn domain_push_ex(domain: usize, attributes: *const Attributes) -> c_int {
    // SAFETY: as NVTX asks for.
    push(domain, unsafe { marked_by(attributes) })
}

unsafe extern "C" fn pop() -> c_int {
    STACK.with(|stack| stack.pop(0));
    NOT_TRACKED
}

unsafe extern "C" fn domain_pop(domain: usize) -> c_int {
    STACK.with(|stack| stack.pop(domain));
    NOT_TRACKED
}

unsafe extern "C" fn start_a(text: *const c_char) -> u64 {
    // SAFETY: as NVTX asks for.
    start(unsafe { marked(text) })
}

unsafe extern "C" fn start_ex(attributes: *const Attributes) -> u64 {
    // SAFETY: as NVTX asks for.
    start(unsafe { marked_by(attributes) })
}

unsafe extern "C" fn domain_start_ex(_: usize, attributes: *const Attributes) -> u64 {
    // SAFETY: as NVTX asks for.
    start(unsafe { marked_by(attributes) })
}

unsafe extern "C" fn end(identity: u64) {
    marks::end(identity);
}

unsafe extern "C" fn domain_end(_: usize, identity: u64) {
    marks::end(identity);
}

/// A handle; null for a text that marks nothing.
unsafe extern "C" fn register_string(_: usize, text: *const c_char) -> u64 {
    // SAFETY: as NVTX asks for.
    unsafe { marked(text) }.map_or(0, handle_of)
}

/// A handle made of the domain's name, so that nothing is kept and each library of the program has the same.
unsafe extern "C" fn create_domain(name: *const c_char) -> u64 {
    if name.is_null() {
        return 0;
    }
    // SAFETY: as NVTX asks for.
    tally_ipc::layout::fnv1a(unsafe { rest(name.cast()) }) | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn what(text: &std::ffi::CStr) -> Option<What> {
        // SAFETY: NUL-terminated.
        unsafe { marked(text.as_ptr()) }
    }

    #[test]
    fn only_the_three_names_mark_units() {
        let of = |kind, age_us| Some(What::marked(kind, age_us));
        for (text, expected) in [
            (c"tally:request", of(Kind::Request, None)),
            (c"tally:token", of(Kind::Token, None)),
            (c"tally:prefill later=1", of(Kind::Prefill, None)),
            (c"tally:request age_us=1500", of(Kind::Request, Some(1_500))),
            (c"tally:request id=7 age_us=0", of(Kind::Request, Some(0))),
            (c"tally:request age_us=-1", of(Kind::Request, None)),
            (c"tally:request age_us=99999999999999999999999", of(Kind::Request, None)),
            (c"tally:requests", None),
            (c"tally:", None),
            (c"tally", None),
            (c"request", None),
            (c"", None),
        ] {
            assert_eq!(what(text), expected, "{text:?}");
            // SAFETY: NUL-terminated.
            let handle = unsafe { register_string(0, text.as_ptr()) };
            assert_eq!(registered(handle), expected, "{text:?}");
        }
        let long =
            std::ffi::CString::new("tally:request ".to_owned() + &"x".repeat(9_000)).unwrap();
        assert_eq!(what(&long), of(Kind::Request, None));
        // SAFETY: null is no text.
        let null = unsafe { (marked(std::ptr::null()), marked_by(std::ptr::null())) };
        assert_eq!(null, (None, None));
        assert_eq!((registered(0), registered(0x5555_0000_1234)), (None, None));
    }

    #[test]
    fn an_integer_payload_is_the_age_that_the_text_does_not_say() {
        let age = |text: &std::ffi::CStr, payload_kind, payload| {
            let message = text.as_ptr() as u64;
            let attributes = Attributes {
                version: 3,
                bytes: 48,
                _category: 0,
                _colour: [0; 2],
                payload_kind,
                _reserved: 0,
                payload,
                message_kind: MESSAGE_ASCII,
                message,
            };
            let short = Attributes { bytes: 47, ..attributes };
            // SAFETY: valid for the call.
            assert_eq!(unsafe { marked_by(&short) }, None);
            // SAFETY: as above.
            unsafe { marked_by(&attributes) }.map(|what| what.age_us)
        };
        let request = c"tally:request";
        for (kind, payload, expected) in [
            (0, 7, None),
            (PAYLOAD_U64, 1 << 40, Some(1 << 40)),
            (PAYLOAD_I64, 1_500, Some(1_500)),
            (PAYLOAD_I64, u64::MAX, None),
            (3, 1.5_f64.to_bits(), None),
            (PAYLOAD_U32, 0xffff_ffff_0000_0007, Some(7)),
            (PAYLOAD_I32, 0xffff_fffe, None),
        ] {
            assert_eq!(age(request, kind, payload), Some(expected), "{kind} {payload:#x}");
        }
        assert_eq!(age(c"tally:request age_us=3", PAYLOAD_I64, 9), Some(Some(3)));
        assert_eq!(age(c"request", PAYLOAD_I64, 9), None);
    }

    #[test]
    fn a_domain_has_one_handle_of_its_own() {
        // SAFETY: NUL-terminated.
        let [a, again, b] = [c"a", c"a", c"b"].map(|name| unsafe { create_domain(name.as_ptr()) });
        assert!(a == again && a != b && a != 0 && b != 0);
    }

    #[test]
    fn a_pop_ends_the_unit_that_its_domain_pushed_last() {
        let unit = what(c"tally:token");
        STACK.with(|stack| {
            let depth = || stack.count.get();
            stack.pop(0);
            stack.push(0, None);
            stack.push(0, unit);
            stack.push(0, None);
            // Another domain in between.
            stack.push(5, unit);
            assert_eq!(depth(), 2);
            stack.pop(0);
            assert_eq!(depth(), 2, "that was the range above the unit");
            stack.pop(0);
            assert_eq!(depth(), 1);
            assert_eq!(stack.top(0), None);
            stack.pop(0);
            assert_eq!(depth(), 1, "that was the range below it");
            stack.pop(5);
            assert_eq!(depth(), 0);
            // Those that find no place nest as well.
            for _ in 0..NESTED_MAX + 3 {
                stack.push(0, unit);
            }
            (0..3).for_each(|_| stack.pop(0));
            assert_eq!(depth(), NESTED_MAX);
            (0..NESTED_MAX).for_each(|_| stack.pop(0));
            assert_eq!(depth(), 0);
        });
    }

    /// Tables as the headers have them: an array of places, the first one null.
    #[test]
    fn functions_are_put_into_both_tables_and_no_other_place_is_touched() {
        const COUNT: usize = 16;
        static mut PLACES: [[Function; COUNT]; 2] = [[std::ptr::null(); COUNT]; 2];
        static mut TABLES: [[*mut Function; COUNT]; 2] = [[std::ptr::null_mut(); COUNT]; 2];
        unsafe extern "C" fn module(
            number: c_int,
            table: *mut *const *mut Function,
            count: *mut u32,
        ) -> c_int {
            let at = match number {
                MODULE_CORE => 0,
                MODULE_CORE2 => 1,
                _ => return 0,
            };
            // SAFETY: one thread; valid out-pointers.
            unsafe {
                for id in 1..COUNT {
                    TABLES[at][id] = &raw mut PLACES[at][id];
                }
                *table = (&raw const TABLES[at]).cast();
                // The first table is that of an older version, without `pop`.
                *count = if at == 0 { 11 } else { COUNT as u32 };
            }
            1
        }
        unsafe extern "C" fn get(id: u32) -> *const c_void {
            static CALLBACKS_TABLE: Callbacks = Callbacks { bytes: 16, module: Some(module) };
            match id {
                CALLBACKS => (&raw const CALLBACKS_TABLE).cast(),
                _ => std::ptr::null(),
            }
        }
        unsafe extern "C" fn none(_: u32) -> *const c_void {
            std::ptr::null()
        }
        // SAFETY: tables as above.
        unsafe {
            assert!(!install(none));
            assert!(install(get));
            for (at, functions) in [CORE.0, CORE2.0].into_iter().enumerate() {
                for id in 0..COUNT as u32 {
                    let ours = functions.iter().find(|(known, _)| *known == id);
                    let expected = match ours {
                        Some((_, function)) if at == 1 || id < 11 => *function,
                        _ => std::ptr::null(),
                    };
                    assert_eq!(PLACES[at][id as usize], expected, "{at} {id}");
                }
            }
        }
    }
}
