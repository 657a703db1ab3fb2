//! Places where a test can make the process die, as a crash would. In a release build there are none.
//!
//! `DENORMD_CRASH=written:3` ends the process when it comes to the place `written` for the third time.
//! `tests/faults/crashes.rs` finds the places in the source, and dies at each.

/// The process dies here when a test wants it to.
#[inline]
pub fn here(place: &'static str) {
    #[cfg(debug_assertions)]
    wanted::reached(place);
    #[cfg(not(debug_assertions))]
    let _ = place;
}

#[cfg(debug_assertions)]
mod wanted {
    use std::sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    };

    static WANTED: OnceLock<Option<(String, u32)>> = OnceLock::new();
    static REACHED: AtomicU32 = AtomicU32::new(0);

    pub fn reached(place: &'static str) {
        let wanted = WANTED.get_or_init(|| {
            let text = std::env::var("DENORMD_CRASH").ok()?;
            let (place, nth) = text.split_once(':')?;
            Some((place.to_owned(), nth.parse().ok()?))
        });
        if let Some((wanted, nth)) = wanted
            && wanted == place
            && REACHED.fetch_add(1, Ordering::SeqCst) + 1 == *nth
        {
            tracing::error!(place, nth, "aborting at the failpoint named by DENORMD_CRASH");
            std::process::abort();
        }
    }
}
