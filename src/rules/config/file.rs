//! Files that are read whole, up to a limit: a config may name an endless file.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

/// Bytes of a config file, at most.
pub(super) const CONFIG: u64 = 4 << 20;
/// Bytes of all config files, at most.
pub(super) const CONFIGS: usize = 16 << 20;
/// Bytes of a file with a secret or a certificate, at most.
pub const SECRET: u64 = 1 << 20;

/// The text of a file of at most `most` bytes.
pub fn read(path: &Path, most: u64) -> io::Result<String> {
    String::from_utf8(bytes(path, most)?).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is not UTF-8"))
}

/// The content of a file of at most `most` bytes.
pub fn bytes(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    File::open(path)?.take(most + 1).read_to_end(&mut content)?;
    if content.len() as u64 > most {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it is larger than {} KiB", most >> 10)));
    }
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_its_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, "1234").unwrap();
        assert_eq!(read(&path, 4).unwrap(), "1234");
        assert_eq!(read(&path, 3).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        assert_eq!(read(Path::new("/dev/zero"), 1 << 20).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }
}
