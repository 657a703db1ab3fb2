//! The operating system's random numbers, drawn from a seed in the threads that have one.

use std::cell::Cell;

thread_local! {
    static STATE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Sets the seed of this thread's random numbers.
pub fn seed(seed: u64) {
    STATE.set(Some(seed));
}

/// True in a thread that has a seed.
pub fn is_seeded() -> bool {
    STATE.get().is_some()
}

/// The next state and number of `SplitMix64`.
fn next(state: u64) -> (u64, u64) {
    let state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (state, mixed ^ (mixed >> 31))
}

/// Replaces the C library's function, which the standard library calls for the seeds of hash maps.
///
/// # Safety
///
/// `buffer` points to `length` bytes that can be written.
#[expect(unsafe_code, reason = "the function of the C library has this signature")]
#[unsafe(no_mangle)]
unsafe extern "C" fn getrandom(buffer: *mut u8, length: usize, flags: u32) -> isize {
    let Some(mut state) = STATE.get() else {
        // SAFETY: the arguments are the caller's, and those of the system call.
        let read = unsafe { libc::syscall(libc::SYS_getrandom, buffer, length, flags) };
        return isize::try_from(read).unwrap_or(-1);
    };
    // SAFETY: the caller has promised it.
    let bytes = unsafe { std::slice::from_raw_parts_mut(buffer, length) };
    for chunk in bytes.chunks_mut(8) {
        let number;
        (state, number) = next(state);
        chunk.copy_from_slice(&number.to_le_bytes()[..chunk.len()]);
    }
    STATE.set(Some(state));
    isize::try_from(length).unwrap_or(-1)
}
