//! Connections: their number, their time limits, and the choice of the one to close when there are too many.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use axum::Router;
use hyper::{Request, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use super::Guard;

/// Time for the header of a request; also the lifetime of a connection without a request.
const HEADER_TIME: Duration = Duration::from_secs(30);
/// Time for the handshake of TLS, before any request.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// Time for everything else that the client has to do: sending a body that nobody reads, reading the response.
const CLIENT_TIME: Duration = Duration::from_secs(60);
/// Bytes of a request's header, and of a response that waits to be sent.
const BUFFER: usize = 16 << 10;
/// Header lines of a request.
const HEADERS: usize = 64;
/// Most connections. Half of the process's file descriptors stay free for MongoDB and files.
const MOST: usize = 512;
/// Connections that wait to be accepted. Beyond it the system drops them silently, and a client retries after a second.
const BACKLOG: u32 = 4096;
/// File descriptors of a process whose limit cannot be read: the usual limit.
const USUAL_FILES: usize = 1024;
/// Age below which a connection is not closed to make room: its request may have arrived but not been read yet.
const GRACE: Duration = Duration::from_millis(250);
/// Pause after a connection could not be accepted.
const PAUSE: Duration = Duration::from_millis(50);

/// Listens for connections.
pub(super) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Serves every connection until `stop`.
pub(super) async fn serve(listener: TcpListener, router: Router, guard: Arc<Guard>, stop: CancellationToken) {
    let table = Table::new(most(files()));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        match accepted {
            Ok((stream, peer)) => {
                // Without a place the stream is dropped, which closes it.
                if let Some(place) = table.place(peer.ip(), &stop).await {
                    tokio::spawn(converse(stream, place, router.clone(), guard.handshake()));
                }
            }
            Err(error) => {
                tracing::debug!(%error, "a connection cannot be accepted");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Most connections of a process that may open this number of files.
fn most(files: usize) -> usize {
    (files / 2).clamp(1, MOST)
}

/// Number of files that this process may open.
fn files() -> usize {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let soft = limits.lines().find_map(|line| line.strip_prefix("Max open files")?.split_whitespace().next());
    soft.map_or(USUAL_FILES, |soft| soft.parse().unwrap_or(usize::MAX))
}

async fn converse(stream: TcpStream, place: Place, router: Router, handshake: Option<TlsAcceptor>) {
    // A response is one piece: waiting for more gains nothing.
    stream.set_nodelay(true).ok();
    let Some(handshake) = handshake else { return answer(stream, place, router).await };
    let connection = place.connection.clone();
    let accepted = tokio::select! {
        accepted = tokio::time::timeout(HANDSHAKE_TIME, handshake.accept(stream)) => accepted,
        () = connection.closed.cancelled() => return,
    };
    match accepted {
        Ok(Ok(stream)) => answer(stream, place, router).await,
        Ok(Err(error)) => tracing::trace!(%error, "a connection has ended in its TLS handshake"),
        Err(_) => tracing::trace!("a TLS handshake has taken too long"),
    }
}

/// Answers the requests of a connection.
async fn answer(stream: impl AsyncRead + AsyncWrite + Send + Unpin, place: Place, router: Router) {
    let connection = place.connection.clone();
    let service = service_fn(|request: Request<Incoming>| {
        place.connection.set_busy(true);
        let answer = hyper::service::Service::call(&TowerToHyperService::new(router.clone()), request);
        async {
            let answer = answer.await;
            place.connection.set_busy(false);
            answer
        }
    });
    let conversation = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME)
        .max_buf_size(BUFFER)
        .max_headers(HEADERS)
        .serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        ended = conversation => if let Err(error) = ended {
            tracing::trace!(%error, "a connection has ended");
        },
        () = connection.closed.cancelled() => {}
        () = connection.times_out() => {}
    }
}

/// All connections.
#[derive(Debug)]
struct Table {
    free: Arc<Semaphore>,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    next: u64,
    connections: BTreeMap<u64, Arc<Connection>>,
}

impl Table {
    fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { free: Arc::new(Semaphore::new(most)), open: Mutex::default() })
    }

    /// Makes room for a connection. None when every other one waits for its response.
    async fn place(self: &Arc<Self>, peer: IpAddr, stop: &CancellationToken) -> Option<Place> {
        let permit = loop {
            let free = self.free.clone();
            if let Ok(permit) = free.clone().try_acquire_owned() {
                break permit;
            }
            let oldest = self.chosen()?;
            if oldest.age() >= GRACE {
                oldest.closed.cancel();
                break free.acquire_owned().await.ok()?;
            }
            // Further clients wait in the system's queue meanwhile.
            if let Ok(permit) = tokio::time::timeout(GRACE.saturating_sub(oldest.age()), free.acquire_owned()).await {
                break permit.ok()?;
            }
        };
        let connection = Connection::new(peer, stop.child_token());
        let mut open = self.open.lock();
        let number = open.next;
        open.next += 1;
        open.connections.insert(number, connection.clone());
        drop(open);
        Some(Place { number, connection, table: self.clone(), _permit: permit })
    }

    /// The connection that has been idle for the longest time, of the client that has the most connections: a client
    /// with few of them, such as a scraper, keeps them. None when all of them wait for a response.
    fn chosen(&self) -> Option<Arc<Connection>> {
        let open = self.open.lock();
        let mut count: HashMap<IpAddr, usize> = HashMap::new();
        for connection in open.connections.values() {
            *count.entry(connection.peer).or_default() += 1;
        }
        let idle = open.connections.values().filter_map(|connection| {
            let since = connection.idle_since().filter(|_| !connection.closed.is_cancelled())?;
            Some((Reverse(count.get(&connection.peer).copied()), since, connection))
        });
        idle.min_by_key(|(count, since, _)| (*count, *since)).map(|(.., connection)| connection.clone())
    }
}

/// A connection's place in the table, for as long as the connection lasts.
#[derive(Debug)]
struct Place {
    number: u64,
    connection: Arc<Connection>,
    table: Arc<Table>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.table.open.lock().connections.remove(&self.number);
    }
}

#[derive(Debug)]
struct Connection {
    peer: IpAddr,
    since: Instant,
    closed: CancellationToken,
    /// Start of the current idle time; None while a request is being answered.
    idle: Mutex<Option<Instant>>,
}

impl Connection {
    fn new(peer: IpAddr, closed: CancellationToken) -> Arc<Self> {
        let since = Instant::now();
        Arc::new(Self { peer, since, closed, idle: Mutex::new(Some(since)) })
    }

    fn age(&self) -> Duration {
        self.since.elapsed()
    }

    fn set_busy(&self, busy: bool) {
        *self.idle.lock() = (!busy).then(Instant::now);
    }

    fn idle_since(&self) -> Option<Instant> {
        *self.idle.lock()
    }

    /// Waits until the client has taken too long.
    async fn times_out(&self) {
        loop {
            match self.idle_since() {
                Some(since) if since.elapsed() >= CLIENT_TIME => return,
                Some(since) => tokio::time::sleep_until(since + CLIENT_TIME).await,
                None => tokio::time::sleep(CLIENT_TIME).await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCRAPER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
    const FLOOD: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));

    #[test]
    fn half_of_the_file_descriptors_stay_free() {
        for (files, expected) in [(1024, 512), (256, 128), (1, 1), (usize::MAX, 512)] {
            assert_eq!(most(files), expected, "{files}");
        }
        assert!(files() > 1);
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_idle_connection_of_the_client_with_the_most_makes_room() {
        let (table, stop) = (Table::new(4), CancellationToken::new());
        let mut places = Vec::new();
        for peer in [SCRAPER, FLOOD, FLOOD, FLOOD] {
            places.push(table.place(peer, &stop).await.unwrap());
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        places[1].connection.set_busy(true);
        let begun = Instant::now();
        // Ends when the place of the closed connection is free.
        let (newer, chosen) = tokio::join!(table.place(SCRAPER, &stop), async {
            let chosen = loop {
                tokio::time::sleep(Duration::from_millis(1)).await;
                if let Some(chosen) = places.iter().position(|place| place.connection.closed.is_cancelled()) {
                    break chosen;
                }
            };
            places.remove(chosen);
            chosen
        });
        assert_eq!(chosen, 2, "the oldest that is not being answered, not the scraper's");
        assert!(begun.elapsed() >= Duration::from_millis(240), "a new connection has time to send its request");
        places.push(newer.unwrap());
        for place in &places {
            place.connection.set_busy(true);
        }
        assert!(table.place(SCRAPER, &stop).await.is_none(), "what is being answered is never closed for another");
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_too_long_is_left() {
        let connection = Connection::new(FLOOD, CancellationToken::new());
        let begun = Instant::now();
        connection.times_out().await;
        assert_eq!(begun.elapsed(), CLIENT_TIME);
    }
}
