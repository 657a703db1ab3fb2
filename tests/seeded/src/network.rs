//! The operating system's TCP sockets, which are Unix sockets in the threads that have a seed.
//!
//! The kernel delivers to a Unix socket before `send` returns. Over the loopback interface a message may arrive later, and
//! later still on a busy machine; a paused clock would have advanced by then. Names contain the process, so that two
//! simulations may use the same addresses.
//!
//! Each function replaces one of the C library, which the standard library and tokio call.

use std::{
    ffi::{c_int, c_long, c_void},
    mem::{offset_of, size_of},
    net::{Ipv4Addr, SocketAddrV4},
    process,
};

use libc::{AF_INET, AF_UNIX, IPPROTO_TCP, in_addr, sa_family_t, sockaddr, sockaddr_in, sockaddr_un, socklen_t};

use crate::random::is_seeded;

/// The bytes of an address before its name.
const HEADER: usize = offset_of!(sockaddr_un, sun_path);

/// The Unix address that stands for an IPv4 address, and its length.
#[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "small constants, and bytes as bytes")]
fn unix(address: &sockaddr_in) -> (sockaddr_un, socklen_t) {
    let address = SocketAddrV4::new(address.sin_addr.s_addr.to_ne_bytes().into(), u16::from_be(address.sin_port));
    let name = format!("{} {address}", process::id());
    let mut unix = sockaddr_un { sun_family: AF_UNIX as sa_family_t, sun_path: [0; 108] };
    // A name that begins with 0 is no file, and vanishes with its socket.
    for (to, from) in unix.sun_path[1..].iter_mut().zip(name.bytes()) {
        *to = from as _;
    }
    (unix, (HEADER + 1 + name.len()) as socklen_t)
}

/// The IPv4 address that a Unix address of this length stands for; the port is 0 if it has no name.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small constant, and bytes as bytes")]
fn inet(unix: &sockaddr_un, length: socklen_t) -> sockaddr_in {
    let name: Vec<u8> = unix.sun_path.iter().take(length as usize - HEADER).skip(1).map(|byte| *byte as u8).collect();
    let address = String::from_utf8_lossy(&name).split_once(' ').and_then(|(_, address)| address.parse().ok());
    let address = address.unwrap_or(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0));
    let ip = in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) };
    sockaddr_in { sin_family: AF_INET as sa_family_t, sin_port: address.port().to_be(), sin_addr: ip, sin_zero: [0; 8] }
}

/// Converts the result of a system call to the type that the C library's functions have.
fn returned(result: c_long) -> c_int {
    c_int::try_from(result).unwrap_or(-1)
}

/// Calls the kernel with an address, which is replaced in a simulation.
///
/// # Safety
///
/// `address` has `length` bytes.
#[expect(unsafe_code, reason = "addresses are pointers")]
unsafe fn with_address(call: c_long, socket: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    // SAFETY: the caller has promised it, and an address of a family has its type.
    unsafe {
        if is_seeded() && c_int::from((*address).sa_family) == AF_INET {
            let (unix, length) = unix(&address.cast::<sockaddr_in>().read_unaligned());
            return returned(libc::syscall(call, socket, &raw const unix, length));
        }
        returned(libc::syscall(call, socket, address, length))
    }
}

/// Calls the kernel for an address, which is replaced in a simulation.
///
/// # Safety
///
/// `address` is null, or has room for the address of an IPv4 socket and for `length` bytes.
#[expect(unsafe_code, reason = "addresses are pointers")]
unsafe fn for_address(
    call: c_long,
    socket: c_int,
    address: *mut sockaddr,
    length: *mut socklen_t,
    flags: c_int,
) -> c_int {
    let mut unix = sockaddr_un { sun_family: 0, sun_path: [0; 108] };
    let mut size = socklen_t::try_from(size_of::<sockaddr_un>()).unwrap_or(0);
    // SAFETY: the caller has promised it.
    unsafe {
        if !is_seeded() || address.is_null() {
            return returned(libc::syscall(call, socket, address, length, flags));
        }
        let result = libc::syscall(call, socket, &raw mut unix, &raw mut size, flags);
        if result >= 0 {
            address.cast::<sockaddr_in>().write_unaligned(inet(&unix, size));
            *length = socklen_t::try_from(size_of::<sockaddr_in>()).unwrap_or(0);
        }
        returned(result)
    }
}

#[expect(unsafe_code, reason = "the function of the C library has this signature")]
#[unsafe(no_mangle)]
unsafe extern "C" fn socket(family: c_int, kind: c_int, protocol: c_int) -> c_int {
    let is_replaced = is_seeded() && family == AF_INET;
    let (family, protocol) = if is_replaced { (AF_UNIX, 0) } else { (family, protocol) };
    // SAFETY: numbers alone.
    returned(unsafe { libc::syscall(libc::SYS_socket, family, kind, protocol) })
}

#[expect(unsafe_code, reason = "the function of the C library has this signature")]
#[unsafe(no_mangle)]
unsafe extern "C" fn bind(socket: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    // SAFETY: as the C library demands it.
    unsafe { with_address(libc::SYS_bind, socket, address, length) }
}

#[expect(unsafe_code, reason = "the function of the C library has this signature")]
#[unsafe(no_mangle)]
unsafe extern "C" fn connect(socket: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    // SAFETY: as the C library demands it.
    unsafe { with_address(libc::SYS_connect, socket, address, length) }
}

#[expect(unsafe_code, reason = "the function of the C library has this signature")]
#[unsafe(no_mangle)]
unsafe extern "C" fn accept4(socket: c_int, address: *mut sockaddr, length: *mut socklen_t, flags: c_int) -> c_int {
    // SAFETY: as the C library demands it; the standard library and mio leave room for an address of any family.
    unsafe { for_address(libc::SYS_accept4, socket, address, length, flags) }
}

#[expect(unsafe_code, reason = "the function of the C library has this signature")]
#[unsafe(no_mangle)]
unsafe extern "C" fn getsockname(socket: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
    // SAFETY: as the C library demands it; the standard library and mio leave room for an address of any family.
    unsafe { for_address(libc::SYS_getsockname, socket, address, length, 0) }
}

/// A Unix socket has none of the options of TCP, and needs none.
#[expect(unsafe_code, reason = "the function of the C library has this signature")]
#[unsafe(no_mangle)]
unsafe extern "C" fn setsockopt(
    socket: c_int,
    level: c_int,
    option: c_int,
    value: *const c_void,
    length: socklen_t,
) -> c_int {
    if is_seeded() && level == IPPROTO_TCP {
        return 0;
    }
    // SAFETY: as the C library demands it.
    returned(unsafe { libc::syscall(libc::SYS_setsockopt, socket, level, option, value, length) })
}
