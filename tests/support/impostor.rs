//! Servers that are something else than they say: recorded replies, or those of a real server with some changes.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
    time::Duration,
};

use bson::{Document, doc};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

/// Operation codes of the wire protocol.
const OP_REPLY: i32 = 1;
const OP_QUERY: i32 = 2004;
const OP_MSG: i32 = 2013;

/// An impostor's reaction to a command.
pub enum Answer {
    /// This reply, after this time.
    Recorded(Document, Duration),
    /// The real server's reply.
    Forwarded,
    /// The real server's reply, with changes.
    Changed(fn(&mut Document)),
    /// None: the connection stays open.
    Silence,
}

/// A recorded reply.
#[must_use]
pub fn recorded(reply: Document) -> Answer {
    Answer::Recorded(reply, Duration::ZERO)
}

/// The refusal of a command that a server does not have.
#[must_use]
pub fn no_such_command(name: &str) -> Answer {
    recorded(doc! {"ok": 0.0, "code": 59, "codeName": "CommandNotFound", "errmsg": format!("no such command: {name}")})
}

/// A server that answers as it is told.
pub struct Impostor {
    pub address: SocketAddr,
    asked: Arc<Mutex<Vec<Document>>>,
}

/// The way to react to a command, from its name in lower case and its document.
type Answers = dyn Fn(&str, &Document) -> Answer + Send + Sync;

impl Impostor {
    /// Starts one, before a real server if some commands are for it. It ends with the test's runtime.
    pub async fn start(
        server: Option<SocketAddr>,
        answers: impl Fn(&str, &Document) -> Answer + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let (address, asked) = (listener.local_addr().unwrap(), Arc::new(Mutex::new(Vec::new())));
        let (all, answers): (_, Arc<Answers>) = (asked.clone(), Arc::new(answers));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, server, answers.clone(), all.clone()));
            }
        });
        Self { address, asked }
    }

    /// The commands that were received.
    #[must_use]
    pub fn asked(&self) -> Vec<Document> {
        self.asked.lock().unwrap().clone()
    }
}

async fn serve(
    mut client: TcpStream,
    server: Option<SocketAddr>,
    answers: Arc<Answers>,
    asked: Arc<Mutex<Vec<Document>>>,
) -> io::Result<()> {
    client.set_nodelay(true)?;
    let mut server = match server {
        Some(address) => Some(TcpStream::connect(address).await?),
        None => None,
    };
    loop {
        let request = message(&mut client).await?;
        let command = document(&request);
        let name = command.keys().next().unwrap().to_lowercase();
        let answer = answers(&name, &command);
        asked.lock().unwrap().push(command);
        let reply = match answer {
            Answer::Recorded(mut reply, after) => {
                tokio::time::sleep(after).await;
                if !reply.contains_key("ok") {
                    reply.insert("ok", 1.0);
                }
                framed(&request, &reply)
            }
            Answer::Forwarded => forwarded(server.as_mut().unwrap(), &request).await?,
            Answer::Changed(change) => {
                let mut reply = document(&forwarded(server.as_mut().unwrap(), &request).await?);
                change(&mut reply);
                framed(&request, &reply)
            }
            Answer::Silence => std::future::pending().await,
        };
        client.write_all(&reply).await?;
    }
}

async fn forwarded(server: &mut TcpStream, request: &[u8]) -> io::Result<Vec<u8>> {
    server.write_all(request).await?;
    message(server).await
}

/// The next message, with its header: length, id, the id that it answers, and operation code.
async fn message(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let length = stream.read_i32_le().await?;
    let mut message = vec![0; usize::try_from(length).unwrap()];
    message[..4].copy_from_slice(&length.to_le_bytes());
    stream.read_exact(&mut message[4..]).await?;
    Ok(message)
}

fn number(message: &[u8], at: usize) -> i32 {
    i32::from_le_bytes(message[at..at + 4].try_into().unwrap())
}

/// The command in a request, or the document of a reply. Documents in further sections of a message are left out.
fn document(message: &[u8]) -> Document {
    let at = match number(message, 12) {
        // Flags, the collection's name, and two numbers.
        OP_QUERY => 20 + message[20..].iter().position(|byte| *byte == 0).unwrap() + 1 + 8,
        // Flags, the cursor's id, and two numbers.
        OP_REPLY => 36,
        // Flags, and the kind of the first section.
        OP_MSG => 21,
        code => panic!("operation code {code}"),
    };
    Document::from_reader(&message[at..]).unwrap()
}

/// A reply to a request, in the form in which it was sent.
fn framed(request: &[u8], reply: &Document) -> Vec<u8> {
    let is_query = number(request, 12) == OP_QUERY;
    let mut body = if is_query {
        [8_i32, 0, 0, 0, 1].iter().flat_map(|number| number.to_le_bytes()).collect()
    } else {
        vec![0; 5]
    };
    reply.to_writer(&mut body).unwrap();
    let code = if is_query { OP_REPLY } else { OP_MSG };
    let header = [i32::try_from(body.len()).unwrap() + 16, 1, number(request, 4), code];
    let mut message: Vec<u8> = header.iter().flat_map(|number| number.to_le_bytes()).collect();
    message.append(&mut body);
    message
}
