//! The wire protocol, over TCP.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
};

use bson::{Bson, Document, RawDocument, RawDocumentBuf};
use denormd_mongo::text;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

use crate::{
    Model,
    faults::{Strike, unconfirmed},
    replication::Connection,
    replies::Failure,
    state::is_hello,
};

/// Operation codes.
const OP_REPLY: i32 = 1;
const OP_QUERY: i32 = 2004;
const OP_MSG: i32 = 2013;
/// The port of the first member of a set.
const PORT: u16 = 27017;
/// The sender of a message expects no reply.
const MORE_TO_COME: u32 = 2;

/// A model that listens on a port of this machine. It ends with the runtime.
pub struct Server {
    /// The model.
    pub model: Model,
    addresses: Vec<SocketAddr>,
}

struct Request {
    id: i32,
    code: i32,
    flags: u32,
    command: Document,
}

impl Server {
    /// Listens on a port as the only member; 0 for any port.
    pub async fn start(model: Model, port: u16) -> io::Result<Self> {
        Self::listen(model, &[(Ipv4Addr::LOCALHOST, port)]).await
    }

    /// Listens as a set of so many members, the first of which is the primary. Outside of a simulation, a machine has
    /// room for one.
    pub async fn start_set(model: Model, members: u16) -> io::Result<Self> {
        let addresses: Vec<_> = (0..members).map(|member| (Ipv4Addr::LOCALHOST, PORT + member)).collect();
        Self::listen(model, &addresses).await
    }

    async fn listen(model: Model, addresses: &[(Ipv4Addr, u16)]) -> io::Result<Self> {
        let mut listeners = Vec::new();
        for address in addresses {
            listeners.push(TcpListener::bind(*address).await?);
        }
        let addresses: Vec<SocketAddr> = listeners.iter().map(TcpListener::local_addr).collect::<Result<_, _>>()?;
        model.state().members = addresses.iter().map(ToString::to_string).collect();
        for (member, listener) in listeners.into_iter().enumerate() {
            let serving = model.clone();
            tokio::spawn(async move {
                let mut connections = JoinSet::new();
                while let Ok((stream, _)) = listener.accept().await {
                    connections.spawn(serve(stream, serving.clone(), member));
                    while connections.try_join_next().is_some() {}
                }
            });
        }
        Ok(Self { model, addresses })
    }

    /// The address of the first member.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.addresses[0]
    }

    /// The connection string.
    #[must_use]
    pub fn uri(&self) -> String {
        let hosts: Vec<String> = self.addresses.iter().map(ToString::to_string).collect();
        format!("mongodb://{}/?replicaSet=rs0", hosts.join(","))
    }
}

async fn serve(mut stream: TcpStream, model: Model, member: usize) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut connection = model.connection(Some(member));
    // A monitor's connection outlives elections.
    let mut is_monitor = true;
    loop {
        let request = tokio::select! {
            request = receive(&mut stream) => request?,
            () = model.closed(&connection), if !is_monitor => return Ok(()),
        };
        is_monitor &= is_hello(&request.command);
        if let Some(program) = program(&request.command) {
            program.clone_into(&mut connection.program);
            model.state().programs.insert(program.to_owned());
        }
        model.delay().await;
        if !model.can_communicate(&connection.program).await {
            return Ok(());
        }
        let Some(reply) = struck(&model, &connection, &request.command).await else { return Ok(()) };
        model.delay().await;
        if !model.can_communicate(&connection.program).await {
            return Ok(());
        }
        if request.flags & MORE_TO_COME == 0 {
            stream.write_all(&framed(request.id, request.code, &reply)?).await?;
        }
    }
}

/// The name of the program, which a client sends with its first command.
fn program(command: &Document) -> Option<&str> {
    let client = command.get_document("client").ok()?;
    client.get_document("application").ok()?.get_str("name").ok()
}

/// The answer to a command that a fault may strike; None if the connection is closed.
async fn struck(model: &Model, connection: &Connection, command: &Document) -> Option<Document> {
    match model.strike(connection, command) {
        Strike::Nothing => model.answer(connection, command).await,
        Strike::Refused(reply) => Some(reply),
        Strike::CutOff => None,
        Strike::AnswerLost => {
            model.answer(connection, command).await;
            None
        }
        Strike::Unconfirmed(code) => Some(unconfirmed(model.answer(connection, command).await?, code)),
        Strike::Delayed(time) => {
            tokio::time::sleep(time).await;
            model.answer(connection, command).await
        }
        Strike::TimedOut(limit, takes_effect) => {
            if takes_effect {
                model.answer(connection, command).await?;
            }
            tokio::time::sleep(limit).await;
            let reply = model.state().signed(Failure::too_long().reply());
            Some(reply)
        }
    }
}

fn invalid(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

async fn receive(stream: &mut TcpStream) -> io::Result<Request> {
    let length = stream.read_i32_le().await?;
    let id = stream.read_i32_le().await?;
    let _response_to = stream.read_i32_le().await?;
    let code = stream.read_i32_le().await?;
    let mut body = vec![0; usize::try_from(length - 16).map_err(io::Error::other)?];
    stream.read_exact(&mut body).await?;
    match code {
        OP_QUERY => {
            // Flags, the collection's name, and two numbers.
            let name = body.get(4..).and_then(|rest| rest.iter().position(|byte| *byte == 0));
            let at = 4 + name.ok_or_else(|| invalid("a query without a name"))? + 1 + 8;
            let (mut command, _) = document(&body, at)?;
            command.entry("$db".to_owned()).or_insert_with(|| "admin".into());
            Ok(Request { id, code, flags: 0, command })
        }
        OP_MSG => {
            let (flags, command) = message(&body)?;
            Ok(Request { id, code, flags, command })
        }
        _ => Err(invalid("an operation code")),
    }
}

/// The flags and the command of a message, with the documents of its further sections as arrays.
fn message(body: &[u8]) -> io::Result<(u32, Document)> {
    let flags =
        u32::from_le_bytes(body.get(..4).and_then(|four| four.try_into().ok()).ok_or_else(|| invalid("flags"))?);
    let (mut command, mut more) = (Document::new(), Document::new());
    let mut at = 4;
    while at < body.len() {
        match body[at] {
            0 => (command, at) = document(body, at + 1)?,
            1 => {
                let size = number(body, at + 1)?;
                let end = at + 1 + size;
                let name: Vec<u8> = body[at + 5..].iter().copied().take_while(|byte| *byte != 0).collect();
                let mut inside = at + 5 + name.len() + 1;
                let mut documents = Vec::new();
                while inside < end {
                    let (one, next) = document(body, inside)?;
                    documents.push(Bson::Document(one));
                    inside = next;
                }
                more.insert(String::from_utf8_lossy(&name), documents);
                at = end;
            }
            _ => return Err(invalid("a section")),
        }
    }
    command.extend(more);
    Ok((flags, command))
}

fn number(body: &[u8], at: usize) -> io::Result<usize> {
    let four = body.get(at..at + 4).and_then(|four| four.try_into().ok()).ok_or_else(|| invalid("a number"))?;
    usize::try_from(i32::from_le_bytes(four)).map_err(io::Error::other)
}

/// The document at a place, and the place after it. Strings that are not UTF-8 are escaped.
fn document(body: &[u8], at: usize) -> io::Result<(Document, usize)> {
    let end = at + number(body, at)?;
    let bytes = body.get(at..end).ok_or_else(|| invalid("a document"))?;
    let raw = RawDocument::from_bytes(bytes).map_err(io::Error::other)?;
    let document = Document::try_from(text::escaped(raw).as_ref()).map_err(io::Error::other)?;
    Ok((document, end))
}

fn framed(request: i32, code: i32, reply: &Document) -> io::Result<Vec<u8>> {
    let mut body = if code == OP_QUERY {
        [8_i32, 0, 0, 0, 1].iter().flat_map(|number| number.to_le_bytes()).collect()
    } else {
        vec![0; 5]
    };
    let raw = text::unescaped(RawDocumentBuf::try_from(reply).map_err(io::Error::other)?);
    body.extend_from_slice(raw.as_bytes());
    let answer = if code == OP_QUERY { OP_REPLY } else { OP_MSG };
    let length = i32::try_from(body.len() + 16).map_err(io::Error::other)?;
    let mut message: Vec<u8> = [length, 1, request, answer].iter().flat_map(|number| number.to_le_bytes()).collect();
    message.append(&mut body);
    Ok(message)
}
